# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on a node of Slurm beside the installer's items.

That is slurmd, slurmctld, slurm.conf in force, and what a site's configuration costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from gpulock.alloc.process_scan import ProcessScan
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
from gpulock.install.slurm.install import SlurmInstaller
from gpulock.install.slurm.site import find_own_slurmd, release_fault
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_conf
from gpulock.install.slurm.spank import PlugStack
from gpulock.install.slurm.wanted import TASK, find_slurm_hooks, wanted_setting_lines
from gpulock.install.trial import try_slurm_hooks
from gpulock.install.versions import PLUGIN
from gpulock.node import device_list
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.slurm.steps import SlurmSteps

_AGAIN: Final = "gpulock install slurm"
_PING: Final = "look whether slurmctld runs, and whether this node reaches it: scontrol ping"


class SlurmChecks:
    """The checks of a node of Slurm; each method yields what is wrong with one thing."""

    def __init__(self, settings: Settings, config: Path) -> None:
        self.settings, self.config = settings, config
        self.by_slurm = gres.by_slurm(settings)

    def checks(self) -> list[Check]:
        """Return all checks, those of the node before those of the configuration in force."""
        own = ("slurmctld",)
        cards = (*own, DRIVER)
        trial = partial(check_trial, self.settings, try_slurm_hooks)
        return [
            Check("slurmd", self.slurmd, (INSTALLED,)),
            Check("trial of hooks", trial, (INSTALLED,)),
            Check("slurmctld", self.slurmctld, (INSTALLED,), _PING),
            Check("installation", self.installation, (*own, SETTINGS)),
            Check("slurm.conf", self.own_file, own),
            Check("recommended", self.recommended, own),
            Check("SPANK", self.plugin, own),
            Check("PrologFlags", self.run_in_job, own),
            Check("ConstrainDevices", self.constrained, cards),
            Check("gres.conf", self.flags, cards),
            Check("order of gres.conf", self.order, cards),
        ]

    @cached_property
    def installer(self) -> SlurmInstaller:
        """Return what knows this Slurm and its items; raise InstallError."""
        return SlurmInstaller(self.config)

    @cached_property
    def conf(self) -> SlurmConf:
        """Return what slurmctld goes by; raise InstallError."""
        return self.installer.site.in_force()

    def slurmd(self) -> Iterator[Finding]:
        """Look whether slurmd can be seen, as the reaper must."""
        if find_own_slurmd(self.settings) is None:
            yield fault("none runs here", "start it: systemctl start slurmd")
        elif not SlurmSteps(self.settings).is_slurmd_seen(
            ProcessScan(Proc(self.settings.proc_root))
        ):
            what = "it runs, but a judge of locks does not see it: no lock is ever freed"
            yield fault(what, "run gpulock outside containers, as root with CAP_SYS_PTRACE")

    def slurmctld(self) -> Iterator[Finding]:
        """Look whether slurmctld answers: nobody else knows what is in force."""
        yield fact(f"Slurm {self.conf.get('SLURM_VERSION')}")
        if why := release_fault(self.conf):
            yield fault(why, "update Slurm, or gpulock uninstall slurm; see docs/slurm.md")

    def own_file(self) -> Iterator[Finding]:
        """Look whether this node's slurm.conf, by which slurmd goes, is what slurmctld has read.

        That slurmd has not read its own file since it changed is not seen. A site with NO_CONF_HASH
        has such files on purpose: there only hooks that are missing are told.
        """
        site = self.installer.site
        if site.conf is None or not self.conf.get("HASH_VAL").startswith("Different"):
            return
        paths = self.installer.paths
        in_force = find_slurm_hooks(self.conf, paths, site.conf)
        own = find_slurm_hooks(read_slurm_conf(site.conf), paths, site.conf)
        # a hook that slurmctld lacks as well is the installation's to name
        lacks = [
            one.key
            for one, named in zip(own, in_force)
            if named.ours and not one.ours and one.key != TASK
        ]
        what = f"{site.conf} is not what slurmctld has read"
        do = "put the controller's there, then scontrol reconfigure"
        if lacks:
            yield fault(f"{what}: it lacks {' and '.join(lacks)}, so jobs here get no lock", do)
        elif not self.conf.has("DebugFlags", "NO_CONF_HASH"):
            yield warning(what, do)

    def installation(self) -> Iterator[Finding]:
        """Look what an installation would change, here and in slurm.conf."""
        return check_installation(self.installer.parts, _AGAIN)

    def recommended(self) -> Iterator[Finding]:
        """Name the keys of slurm.conf that had better be otherwise."""
        better = [one for one in wanted_setting_lines(self.conf, self.settings) if not one.needed]
        for one in better:
            what = f"{one.key}={one.value} is not in force, by which {one.why}"
            yield warning(what, "put it into slurm.conf, then scontrol reconfigure")

    def plugin(self) -> Iterator[Finding]:
        """Look whether TaskProlog runs beside the SPANK plugin, which runs the same hook."""
        stack = PlugStack(self.conf, self.installer.site.conf)
        if stack.naming(PLUGIN) and (task := self.conf.get(TASK)):
            what = f"TaskProlog={task} runs as well, and fails inside containers of pyxis"
            yield warning(what, "take it out of slurm.conf: the SPANK plugin runs gpulock's")

    def run_in_job(self) -> Iterator[Finding]:
        """Warn where the Epilog is one of its job's processes."""
        if self.conf.has("PrologFlags", "RunInJob"):
            what = "RunInJob: the Epilog is in its job, and frees no GPU"
            yield warning(what, "take RunInJob out; until then gpulockd frees")

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
            # without the type no job of the cluster's can ask for any
            state = warning if self.conf.has("GresTypes", "gpu") else fault
            yield state(gres.NO_GRES, f"if one should, {gres.LOOK_AT_LIST}")
        elif not self.by_slurm and not gres.has_gres_flag(site, "no_gpu_env"):
            what = "without no_gpu_env, but SLURM_DEVICE_SELECTION=gpulock: Slurm names cards too"
            do = "Flags=no_gpu_env on each Name=gpu line; restart slurmd, do not reconfigure"
            yield fault(what, do)

    def order(self) -> Iterator[Finding]:
        """Look whether position N is the card that CUDA calls N, where that decides the mask."""
        site = self.installer.site
        by_uuid = gres.has_gres_flag(site, "env_uuid")  # 26.05 and later
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
