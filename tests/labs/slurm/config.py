# SPDX-License-Identifier: Apache-2.0
"""What the lab's Slurm is told: slurm.conf, gres.conf and cgroup.conf as values."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Union

from typing_extensions import TypeAlias

Gres: TypeAlias = Literal["slurm", "gpulock", "none"]

# Jobs start at once (the scheduler's own loop wakes up once a second), and no job is forgotten.
SLURM: Final = {
    "ClusterName": "gpulock",
    "SlurmUser": "slurm",
    "AuthType": "auth/munge",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1"
    ",bf_interval=1",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",
    "SlurmdTimeout": "60",
    "MinJobAge": "3600",
    "KillWait": "5",
    "SlurmctldDebug": "verbose",
    "SlurmdDebug": "debug",
    "LogTimeFormat": "iso8601_ms",
}
UNIFIED: Final = Path("/sys/fs/cgroup/cgroup.controllers").exists()  # cgroup version 2 alone
_SCOPE: Final = "IgnoreSystemd=yes\n" if UNIFIED else ""  # there is none to ask for slurmstepd's
CPUS: Final = 32
MAJOR: Final = 195  # NVIDIA's; without a driver an open that is allowed says ENXIO


@dataclass(frozen=True)
class Setup:
    """What a test may choose; `extra` are lines of slurm.conf that win over the lab's own.

    `gres`: Slurm chooses devices, gpulock chooses (`Flags=no_gpu_env`), or there are none. `order`
    has the minors in gres.conf's order by node, `types` the Type= by minor. `hooks` maps Prolog,
    TaskProlog, Epilog, PrologSlurmctld, ... to programs. `shares` has the count of each GRES that
    shares the devices of a node: shard, mps.
    """

    gres: Gres = "slurm"
    gpus: int = 8
    order: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    types: Mapping[int, str] = field(default_factory=dict[int, str])
    shares: Mapping[str, int] = field(default_factory=dict[str, int])
    prolog_flags: str = "Contain"
    proctrack: Literal["linuxproc", "cgroup", "pgid"] = "linuxproc"
    constrain_devices: bool = False
    hooks: Mapping[str, str | Path] = field(default_factory=dict[str, Union[str, Path]])
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    cpus: int = CPUS  # of each node, whatever this machine has

    def minors(self, node: str) -> Sequence[int]:
        """Return the minors of a node's devices by their position in gres.conf."""
        return self.order.get(node, range(self.gpus))


def files(
    lab: Path, setup: Setup, master: tuple[str, str], nodes: Mapping[str, str]
) -> dict[str, str]:
    """Return Slurm's configuration files; `master` and `nodes` are names and addresses."""
    constrain = "yes" if setup.constrain_devices else "no"
    return {
        "slurm.conf": slurm_conf(lab, setup, master, nodes),
        "gres.conf": gres_conf(lab, setup, list(nodes)),
        "cgroup.conf": f"CgroupMountpoint=/sys/fs/cgroup\nConstrainDevices={constrain}\n{_SCOPE}",
    }


def device(lab: Path, node: str, minor: int) -> Path:
    """Return the device file that a node's gres.conf names."""
    return lab / "dev" / node / f"nvidia{minor}"


def first_job(lab: Path) -> int:
    """Return a lab's own first job id: on one kernel no two labs may have steps of one id."""
    return 1000 + zlib.crc32(os.fsencode(lab)) % 60_000 * 1000


def slurm_conf(lab: Path, setup: Setup, master: tuple[str, str], nodes: Mapping[str, str]) -> str:
    """Return slurm.conf."""
    constrained = setup.constrain_devices or setup.proctrack == "cgroup"
    pairs = {
        **SLURM,
        "SlurmctldHost": f"{master[0]}({master[1]})",
        "AuthInfo": f"socket={lab}/munge/socket",
        "StateSaveLocation": f"{lab}/state",
        "SlurmdSpoolDir": f"{lab}/spool/%n",
        "SlurmctldPidFile": f"{lab}/state/slurmctld.pid",
        "SlurmdPidFile": f"{lab}/spool/%n.pid",
        "SlurmctldLogFile": f"{lab}/log/slurmctld.log",
        "SlurmdLogFile": f"{lab}/log/%n.log",
        "FirstJobId": str(first_job(lab)),
        "ProctrackType": f"proctrack/{setup.proctrack}",
        "TaskPlugin": "task/cgroup" if constrained else "task/none",
        **({"PrologFlags": setup.prolog_flags} if setup.prolog_flags else {}),
        **({"GresTypes": ",".join(["gpu", *setup.shares])} if setup.gres != "none" else {}),
        **{key: str(program) for key, program in setup.hooks.items()},
        **setup.extra,
    }
    lines = [f"{key}={value}" for key, value in pairs.items()]
    for node, address in nodes.items():
        gres = f" Gres={asked}" if (asked := _gres(setup, node)) else ""
        lines.append(f"NodeName={node} NodeAddr={address} CPUs={setup.cpus} RealMemory=1000{gres}")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO")
    return "\n".join(lines) + "\n"


def gres_conf(lab: Path, setup: Setup, nodes: Sequence[str]) -> str:
    """Return gres.conf, one line a device in the order asked for."""
    lines = ["AutoDetect=off"]
    for node in nodes:
        if setup.gres != "none":
            flags = " Flags=no_gpu_env" if setup.gres == "gpulock" else ""
            for minor in setup.minors(node):
                kind = f" Type={setup.types[minor]}" if minor in setup.types else ""
                place = device(lab, node, minor)
                lines.append(f"NodeName={node} Name=gpu{kind} File={place}{flags}")
        for name, count in setup.shares.items():
            lines.append(f"NodeName={node} Name={name} Count={count}")
    return "\n".join(lines) + "\n"


def _gres(setup: Setup, node: str) -> str:
    if setup.gres == "none":
        return ""
    kinds = Counter(setup.types.get(minor, "") for minor in setup.minors(node))
    shown = [f"gpu:{kind}:{n}" if kind else f"gpu:{n}" for kind, n in kinds.items()]
    return ",".join([*shown, *[f"{other}:{n}" for other, n in setup.shares.items()]])
