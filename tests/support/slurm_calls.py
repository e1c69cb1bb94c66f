# SPDX-License-Identifier: Apache-2.0
"""What slurmd and slurmstepd put into the environment of a hook: docs/facts/slurm.md."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpulock.install.slurm.gres import GresSource, slurm_map_text
from gpulock.node.context import Node
from gpulock.slurm.gres_map import MAP_NAME, gres_conf_version

SLURMD = "n1"
BATCH = "batch"
USER = 64123 if os.geteuid() == 0 else os.geteuid()  # a job's owner: nobody whom a machine knows
NO_CONF = "/dev/null"  # a real scontrol that a hook may start, without settings, then fails at once


@dataclass(frozen=True)
class SlurmJob:
    """A job of USER to which Slurm gave `positions` of this node, empty: no GPUs.

    `is_masked`: Slurm itself sets CUDA_VISIBLE_DEVICES, for it chooses the devices. Without
    `batch` it is srun's. Of a component of a heterogeneous job, `leader` is the leader's id.
    """

    id: int
    positions: str = ""
    restart: int = 0
    is_masked: bool = True
    batch: bool = True
    leader: int = 0

    def prolog(self) -> dict[str, str]:
        """Return all that a Prolog is given."""
        given = {
            "SLURMD_NODENAME": SLURMD,
            "SLURM_CLUSTER_NAME": "lab",
            "SLURM_CONF": NO_CONF,
            "SLURM_JOBID": str(self.id),
            "SLURM_JOB_CPUS_PER_NODE": "1",
            "SLURM_JOB_GID": str(USER),
            "SLURM_JOB_ID": str(self.id),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_PARTITION": "main",
            "SLURM_JOB_RESTART_COUNT": str(self.restart),
            "SLURM_JOB_UID": str(USER),
            "SLURM_JOB_USER": "labslurm",
            "SLURM_JOB_WORK_DIR": "/tmp",
            "SLURM_NODELIST": SLURMD,
            "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
            "SLURM_UID": str(USER),
            **self._gpus(self.positions),
        }
        if self.positions:
            given["SLURM_JOB_GPUS"] = self.positions
        if self.batch:
            given |= {"SLURM_JOB_STDIN": "/dev/null", "SLURM_JOB_STDOUT": "/tmp/slurm.out"}
        if self.leader:
            given["SLURM_HET_JOB_ID"] = str(self.leader)
        return given

    def epilog(self, gpus: bool = True) -> dict[str, str]:
        """Return all that an Epilog is given; without `gpus` as after slurmctld was away."""
        ended = {
            "SLURM_JOB_EXIT_CODE": "0",
            "SLURM_JOB_EXIT_CODE2": "0:0",
            "SLURM_JOB_DERIVED_EC": "0",
        }
        given = self.prolog() | ended | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
        left_out = () if gpus else ("SLURM_JOB_GPUS", *self._gpus("0"))
        return {name: value for name, value in given.items() if name not in left_out}

    def task(self, step: str = BATCH, gpus: str | None = None) -> dict[str, str]:
        """Return what a TaskProlog is given, the user's own words among it.

        `gpus` are the positions of the step, where it has not all of its job's.
        """
        own = self.positions if gpus is None else gpus
        given = {
            "HOME": "/tmp",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "SLURMD_NODENAME": SLURMD,
            "SLURM_CONF": NO_CONF,
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_GTIDS": "0",
            "SLURM_JOBID": str(self.leader or self.id),
            "SLURM_JOB_GID": str(USER),
            "SLURM_JOB_ID": str(self.leader or self.id),
            "SLURM_JOB_PARTITION": "main",
            "SLURM_JOB_UID": str(USER),
            "SLURM_JOB_USER": "labslurm",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_SCRIPT_CONTEXT": "prolog_task",
            "SLURM_TASK_PID": "1",
            **self._gpus(own),
        }
        if own:
            given |= {"SLURM_GPUS_ON_NODE": str(own.count(",") + 1), "SLURM_JOB_GPUS": own}
        if self.restart:
            given["SLURM_RESTART_COUNT"] = str(self.restart)
        if step != BATCH:
            given |= {"SLURM_STEP_ID": step, "SLURM_STEPID": step, "SLURM_STEP_TASKS_PER_NODE": "1"}
            given |= {"SLURM_STEP_GPUS": own} if own else {}
        return given

    def title(self, step: str = BATCH) -> str:
        """Return the command line of the process that becomes a task."""
        return f"slurmstepd: [{self.id}.{step}]"

    def _gpus(self, positions: str) -> dict[str, str]:
        names = (
            "CUDA_VISIBLE_DEVICES",
            "GPU_DEVICE_ORDINAL",
            "ROCR_VISIBLE_DEVICES",
            "ZE_AFFINITY_MASK",
        )
        return dict.fromkeys(names, positions) if positions and self.is_masked else {}


def users_settings(text: str) -> str:
    """Return the settings for a hook that is the user's: no simulation of root's obeys another."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("SIMULATION="))


def write_map(node: Node, gres_conf: Path, shared: str = "") -> None:
    """Write gres.conf with every device, and the map of its positions."""
    minors = [str(device.minor) for device in node.devices()]
    gres_conf.write_text("".join(f"Name=gpu File=/dev/nvidia{minor}\n" for minor in minors))
    source = GresSource(str(gres_conf), gres_conf_version(str(gres_conf)), "")
    text = slurm_map_text(source, minors, shared.split())
    (Path(node.settings.state_dir) / MAP_NAME).write_text(text)
