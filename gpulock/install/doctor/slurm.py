# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Slurm beside the installer's items.

That is slurmd, slurmctld, slurm.conf in force, and what a site's configuration costs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.doctor.check import (
    DRIVER,
    INSTALLED,
    SETTINGS,
    Check,
    Finding,
    fact,
    fault,
    warning,
)
from gpulock.install.doctor.installation import check_installation, check_trial
from gpulock.install.slurm import gres
from gpulock.install.slurm.conf_item import SlurmOptions
from gpulock.install.slurm.configured_hooks import (
    TASK,
    find_slurm_hooks,
)
from gpulock.install.slurm.install import NO_GRES, SlurmInstaller
from gpulock.install.slurm.site import SlurmError
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_conf
from gpulock.install.slurm.spank import PLUGIN, PlugStack
from gpulock.install.slurm.texts import wanted_setting_lines
from gpulock.install.trial import try_slurm_hooks
from gpulock.install.versions import current_hooks
from gpulock.node import device_list
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import gres_map_device_name
from gpulock.slurm.steps import SlurmSteps

_AGAIN: Final = "gpulock install slurm"
_LINES: Final = (
    "gpulock install slurm --dry-run prints the lines: put them into slurm.conf, or its template"
    " (Ansible, Puppet), then scontrol reconfigure once"
)
# Of a node's State=; a * means that slurmctld gets no answer from slurmd.
_NO_JOBS: Final = ("DRAIN", "DOWN", "FAIL", "INVAL", "UNKNOWN", "NOT_RESPONDING", "*")


class SlurmChecks:
    """The checks of a node of Slurm; each method yields what is wrong with one thing."""

    def __init__(self, settings: Settings, config: Path) -> None:
        self.settings, self.config = settings, config
        self.paths = current_hooks(settings)
        self.by_slurm = gres.by_slurm(settings)

    def checks(self) -> list[Check]:
        """Return all checks, those of the node before those of the configuration in force."""
        first = [
            Check("slurmd", self.slurmd, (INSTALLED,)),
            Check("trial of hooks", self.trial, (INSTALLED,)),
            Check("Slurm", self.release, (INSTALLED,)),
            Check("installation", self.installation, ("Slurm", SETTINGS)),
        ]
        looks = {
            "slurmctld": self.slurmctld,
            "slurm.conf": self.own_file,
            "recommended": self.recommended,
            "SPANK": self.plugin,
            "ProctrackType": self.tracking,
            "node": self.node,
        }
        of_gpus = {
            "ConstrainDevices": self.constrained,
            "gres.conf": self.flags,
            "order of gres.conf": self.order,
            "uncounted GPUs": self.uncounted,
        }
        own = [Check(name, look, ("Slurm",)) for name, look in looks.items()]
        return [
            *first,
            *own,
            *(Check(name, look, ("Slurm", DRIVER)) for name, look in of_gpus.items()),
        ]

    @cached_property
    def installer(self) -> SlurmInstaller:
        """Return what knows this Slurm and its items; raise InstallError."""
        return SlurmInstaller(SlurmOptions(self.config))

    @cached_property
    def conf(self) -> SlurmConf:
        """Return what slurmctld goes by, else what slurm.conf says; raise InstallError."""
        return self.installer.site.best()

    def slurmd(self) -> Iterator[Finding]:
        """Look whether slurmd can be seen, as the reaper must."""
        if self.installer.slurmd is None:
            yield fault("none runs here", "start it: systemctl start slurmd")
        elif not SlurmSteps(self.settings).is_slurmd_seen(
            ProcessScan(Proc(self.settings.proc_root))
        ):
            what = "it runs, but a judge of locks does not see it: no lock is ever freed"
            yield fault(what, "run gpulock outside containers, as root with CAP_SYS_PTRACE")

    def trial(self) -> Iterator[Finding]:
        """Start each hook as a test, that of a task as a user."""
        return check_trial(self.settings, lambda: try_slurm_hooks(self.paths), _AGAIN)

    def release(self) -> Iterator[Finding]:
        """Look whether this node's Slurm is one that gpulock was run on."""
        if why := self.installer.site.release_fault():
            yield fault(why, "update Slurm, or gpulock uninstall slurm; see docs/slurm.md")

    def slurmctld(self) -> Iterator[Finding]:
        """Look whether slurmctld answers."""
        if silent := self.conf.silent:
            what = f"{silent}; what follows is by {self.conf.source}, which may not be in force"
            yield warning(what, "run it again when slurmctld answers")
        else:
            yield fact(f"Slurm {self.conf.get('SLURM_VERSION')}")

    def own_file(self) -> Iterator[Finding]:
        """Look whether this node's slurm.conf is the one that slurmctld has read.

        slurmd goes by its own. One that has not read its file since it changed is not seen. A site
        with NO_CONF_HASH has such files on purpose: there only hooks that are missing are told.
        """
        if not self.conf.get("HASH_VAL").startswith("Different"):
            return
        site = self.installer.site
        hooks = find_slurm_hooks(site.in_file(), self.paths, site.conf)
        lacks = [hook.key for hook in hooks if not hook.ours and hook.key != TASK]
        what = f"{site.conf} is not what slurmctld has read"
        do = "put the controller's there, then scontrol reconfigure"
        if lacks:
            yield fault(f"{what}: it lacks {' and '.join(lacks)}, so jobs here get no lock", do)
        elif not self.conf.has("DebugFlags", "NO_CONF_HASH"):
            yield warning(what, do)

    def installation(self) -> Iterator[Finding]:
        """Look what an installation would change, here and in slurm.conf."""
        return check_installation(lambda: self.installer.parts().items, _AGAIN, _LINES)

    def recommended(self) -> Iterator[Finding]:
        """Name the keys of slurm.conf that had better be otherwise."""
        better = [one for one in wanted_setting_lines(self.conf, self.settings) if not one.needed]
        for one in better:
            first = f"first, beside the controller's slurm.conf, {one.first}; then "
            do = f"{first if one.first else ''}{_LINES}"
            yield warning(f"{one.key}={one.value} is not in force, by which {one.why}", do)

    def plugin(self) -> Iterator[Finding]:
        """Look at the SPANK plugin, which runs TaskProlog's hook where pyxis is."""
        stack, own = PlugStack(self.conf, self.installer.site.conf), self.installer.plugin
        if own.path.exists() and (why := why_untrusted_program(own.path, (0, os.geteuid()))):
            yield fault(why, "let root alone change it: each task loads it")
        elif stack.naming(PLUGIN) and (task := self.conf.get(TASK)):
            what = f"TaskProlog={task} runs as well, and fails inside containers of pyxis"
            yield warning(what, "take it out of slurm.conf: the SPANK plugin runs gpulock's")

    def tracking(self) -> Iterator[Finding]:
        """Warn where children of a job can outlive it, or its Epilog is one of them."""
        if self.conf.has("PrologFlags", "RunInJob"):
            what = "PrologFlags has RunInJob: the Epilog is in its job, and frees no GPU"
            yield warning(what, "take RunInJob out; until then gpulockd frees")
        if (now := self.conf.get("ProctrackType")) in ("proctrack/linuxproc", "proctrack/pgid"):
            what = f"{now}: leftover processes of a job keep its GPUs locked"
            yield warning(what, "ProctrackType=proctrack/cgroup; needs all daemons restarted")

    def node(self) -> Iterator[Finding]:
        """Say where Slurm gives this node no jobs."""
        if self.conf.source != "slurmctld":
            return
        node = self.installer.site.node
        try:
            text = self.installer.site.scontrol("show", "node", node)
        except SlurmError as reason:
            what = f"slurmctld does not know {node}: {reason}"
            yield warning(what, "is NodeName= another? start slurmd with -N NAME")
            return
        state = (re.search(r"\bState=(\S+)", text) or ("", "UNKNOWN"))[1]
        why = (re.search(r"\bReason=(.*)", text) or ("", "no reason given"))[1].strip()
        if any(word in state for word in _NO_JOBS):
            do = f"once it is repaired: scontrol update nodename={node} state=resume"
            yield warning(f"{node} is {state}: {why}", do)

    # --- this node's GPUs, as Slurm counts them

    @cached_property
    def listed(self) -> gres.GresList:
        """Return slurmd's own list, for which it may take 19 s; raise InstallError."""
        return gres.parse_gres_list(self.installer.site.gres())

    def constrains(self) -> bool:
        """Say whether Slurm lets a job open its own devices only."""
        site, conf = self.installer.site, self.conf
        beside = site.conf.with_name("cgroup.conf") if site.conf else None
        if beside and beside.is_file():
            conf = read_slurm_conf(beside)
        return conf.get("ConstrainDevices").lower() == "yes"

    def constrained(self) -> Iterator[Finding]:
        """Look who may open which device."""
        conf = self.conf
        if not self.constrains():
            if self.settings.isolation == "off":
                yield fact("no ConstrainDevices: a job can open any GPU")
        elif not self.by_slurm:
            what = "yes, with SLURM_DEVICE_SELECTION=gpulock: Slurm confines jobs to other cards"
            do = "set SLURM_DEVICE_SELECTION=slurm; or ConstrainDevices=no in cgroup.conf,"
            yield fault(what, f"{do} and restart slurmd")
        elif not conf.has("TaskPlugin", "task/cgroup", "cgroup"):
            what = f"yes, but TaskPlugin is {conf.get('TaskPlugin') or 'none'}: without effect"
            yield warning(what, "TaskPlugin=task/cgroup,task/affinity; restart all daemons")

    def flags(self) -> Iterator[Finding]:
        """Look whether Slurm, too, tells jobs which cards are theirs, and whether it counts any."""
        site = self.installer.site
        if not self.listed.positions:
            what, _, do = NO_GRES.partition("; if ")
            known = self.conf.has(
                "GresTypes", "gpu"
            )  # else no job of the cluster's can ask for any
            yield (warning if known else fault)(what, f"if {do}")
            return
        flags = gres.gpu_flags(site.gres_conf, site.node) if site.gres_conf else []
        if not self.by_slurm and not (flags and all("no_gpu_env" in words for words in flags)):
            what = "without no_gpu_env, but SLURM_DEVICE_SELECTION=gpulock: Slurm names cards too"
            do = "Flags=no_gpu_env on each Name=gpu line; restart slurmd, do not reconfigure"
            yield fault(what, do)

    def order(self) -> Iterator[Finding]:
        """Look whether position N is the card that CUDA calls N, where that decides the mask."""
        site = self.installer.site
        path = site.gres_conf
        by_uuid = bool(path and gres.has_gres_flag(path, site.node, "env_uuid"))  # 26.05 and later
        if not self.by_slurm or self.constrains() or by_uuid:
            return
        places = gres.devices_of_positions(self.settings, self.listed.positions)
        if any("." in place for place in places):
            what = "MIG instances by number, and no ConstrainDevices: no mask of Slurm's is right"
            yield warning(what, "ConstrainDevices=yes in cgroup.conf, TaskPlugin=task/cgroup")
            return
        shown = device_list.read_devices(self.settings.driver_root, self.settings.sys_root)
        index = {device.minor: device.index for device in shown}
        real = [index.get(int(place), -1) for place in places]
        if real == list(range(len(real))):
            return
        first = next(n for n, card in enumerate(real) if n != card)
        what = f"Slurm's GPU {first} is card {real[first]} to CUDA: jobs use each other's cards"
        do = "name all cards in gres.conf, in the order of the PCI bus, or ConstrainDevices=yes"
        yield fault(what, f"{do}; restart slurmd, then gpulock install slurm")

    def uncounted(self) -> Iterator[Finding]:
        """Tell the GPUs that Slurm gives to nobody, where it gives them by position."""
        if not self.by_slurm:
            return
        places = gres.devices_of_positions(self.settings, self.listed.positions)
        shown = Node(self.settings).devices_if_driver()
        names = {gres_map_device_name(device) for device in shown if device.minor >= 0}
        if places and (left := sorted(names - {*places})):
            what = f"Slurm does not count /dev/nvidia{' or '.join(left)}"
            yield warning(what, "name it in gres.conf and Gres=; restart all daemons")
