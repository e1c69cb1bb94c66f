# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the GPUs as Slurm counts them: the order, the kinds, who may open what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from gpulock.install.doctor.check import DRIVER, Check, Finding, fact, fault, warning
from gpulock.install.slurm import gres
from gpulock.install.slurm.install import NO_GRES
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_conf
from gpulock.node import device_list
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import gres_map_device_name


class GresChecks:
    """This node's GPUs in Slurm; each method yields what is wrong with one thing.

    `ask` returns this node's Slurm and its configuration in force; it raises InstallError.
    """

    def __init__(self, settings: Settings, ask: Callable[[], tuple[SlurmSite, SlurmConf]]) -> None:
        self.settings, self.ask = settings, ask
        self.by_slurm = settings.slurm_device_selection == "slurm"

    def checks(self) -> list[Check]:
        """Return all checks of the GPUs."""
        looks = {
            "ConstrainDevices": self.constrained,
            "gres.conf": self.flags,
            "order of gres.conf": self.order,
            "uncounted GPUs": self.uncounted,
        }
        return [Check(name, look, ("Slurm", DRIVER)) for name, look in looks.items()]

    @cached_property
    def listed(self) -> gres.GresList:
        """Return slurmd's own list, for which it may take 19 s; raise InstallError."""
        return gres.parse_gres_list(self.ask()[0].gres())

    def constrains(self) -> bool:
        """Say whether Slurm lets a job open its own devices only."""
        site, conf = self.ask()
        beside = site.conf.with_name("cgroup.conf") if site.conf else None
        if beside and beside.is_file():
            conf = read_slurm_conf(beside)
        return conf.get("ConstrainDevices").lower() == "yes"

    def constrained(self) -> Iterator[Finding]:
        """Look who may open which device."""
        _, conf = self.ask()
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
        site, _ = self.ask()
        if not self.listed.positions:
            what, _, do = NO_GRES.partition("; if ")
            yield warning(what, f"if {do}")
            return
        flags = gres.gpu_flags(site.gres_conf, site.node) if site.gres_conf else []
        if self.by_slurm and any("no_gpu_env" in words for words in flags):
            what = "no_gpu_env, but SLURM_DEVICE_SELECTION=slurm: only TaskProlog names the cards"
            yield warning(what, "take Flags=no_gpu_env out, and restart slurmd")
        if not self.by_slurm and not (flags and all("no_gpu_env" in words for words in flags)):
            what = "without no_gpu_env, but SLURM_DEVICE_SELECTION=gpulock: Slurm names cards too"
            do = "Flags=no_gpu_env on each Name=gpu line; restart slurmd, do not reconfigure"
            yield fault(what, do)

    def order(self) -> Iterator[Finding]:
        """Look whether position N is the card that CUDA calls N, where that decides the mask."""
        site, _ = self.ask()
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
