# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the GPUs as Slurm counts them: the map, the order, who may open what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.doctor.check import Check, fault, ok, run_all, warning
from gpulock.install.doctor.isolation import read_pam_stack
from gpulock.install.slurm import gres
from gpulock.install.slurm.counted import count_gres_type, place_gres_page
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import SlurmConf, read_node_values, read_slurm_conf
from gpulock.isolation import tree
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import (
    GRES_CONF,
    NAME,
    SHARED,
    is_gres_conf_changed,
    map_positions,
    needs_gres_map,
    read_map_pairs,
    read_shared_gres,
)
from gpulock.slurm.request import SHARD

SSHD_STACK = Path("/etc/pam.d/sshd")
_AGAIN: Final = "run gpulock install slurm again"


def has_version_2_alone(sys_root: str) -> bool:
    """Return whether this node has cgroups of version 2 and no other to close devices with."""
    try:
        return [one.version for one in tree.find_hierarchies(sys_root)] == [tree.V2]
    except Refusal:
        return False


class GresChecks:
    """This node's GPUs in Slurm; each method yields the checks of one thing."""

    def __init__(self, settings: Settings, site: SlurmSite, conf: SlurmConf) -> None:
        self.settings = settings
        self.site = site
        self.conf = conf
        self.by_slurm = settings.slurm_device_selection == "slurm"
        self.gres_conf = gres.find_gres_conf(site)
        self.listed = cache(lambda: gres.read_gres_list(site))  # slurmd -G may take 19 s

    def checks(self) -> list[Check]:
        """Return all checks of the GPUs."""
        return run_all(
            {
                "ConstrainDevices": self.constrained,
                "gres.conf": self.flag,
                "slurm-map": self.map,
                "AutoDetect": self.detection,
                "gres/shard, gres/mps": self.shares,
                "counted GRES": self.counted,
                "pam_slurm_adopt": self.sessions,
            }
        )

    def constrains(self) -> bool:
        """Say whether Slurm lets a job open its own devices only."""
        beside = self.site.conf.with_name("cgroup.conf") if self.site.conf else None
        conf = read_slurm_conf(beside) if beside and beside.is_file() else self.conf
        return conf.get("ConstrainDevices").lower() == "yes"

    def constrained(self) -> Iterator[Check]:
        """Look who may open which device."""
        if not self.constrains():
            if self.settings.isolation == "cgroup":
                yield ok("no: ISOLATION=cgroup closes the cards of others instead")
                return
            do = "ConstrainDevices=yes in cgroup.conf" if self.by_slurm else "ISOLATION=cgroup"
            what = "no: the mask is advice, a job can open any card"
            yield warning(what, f"{do} closes the others; see docs/isolation.md")
        elif not self.by_slurm:
            what = "yes, with SLURM_DEVICE_SELECTION=gpulock: Slurm confines jobs to other cards"
            do = "set SLURM_DEVICE_SELECTION=slurm; or ConstrainDevices=no in cgroup.conf,"
            yield fault(what, f"{do} and restart slurmd")
        elif not self.conf.has("TaskPlugin", "task/cgroup", "cgroup"):
            what = f"yes, but TaskPlugin is {self.conf.get('TaskPlugin') or 'none'}: without effect"
            yield warning(what, "TaskPlugin=task/cgroup,task/affinity; restart all daemons")
        else:
            yield ok("yes: a job can open its own cards only")

    def sessions(self) -> Iterator[Check]:
        """Look which GPUs a session opens that comes by ssh (docs/facts/slurm.md, sessions)."""
        lines = read_pam_stack(SSHD_STACK)
        adopting = [words for words in lines if has_pam_module(words, "pam_slurm_adopt")]
        by_cgroup = self.settings.isolation == "cgroup"
        if not adopting:
            if lines and self.constrains() and not by_cgroup:
                what = f"not in {SSHD_STACK}: a user who may log in here opens every card"
                yield warning(what, "add pam_slurm_adopt there, or let no user log in")
            return
        found: list[Check] = []
        if self.conf.get("ProctrackType") != "proctrack/cgroup":
            what = "without proctrack/cgroup a session by ssh is not in its job's cgroup"
            found.append(warning(what, "ProctrackType=proctrack/cgroup; restart all daemons"))
        if any(has_pam_module(words, "pam_systemd") for words in lines):
            what = (
                "pam_systemd takes a session by ssh out of its job again, and it outlives the job"
            )
            found.append(warning(what, f"take pam_systemd out of what {SSHD_STACK} includes"))
        if by_cgroup:
            # sshd's own cgroup is closed; where Slurm's extern step is no part of it, by sessions
            if not self.constrains() and has_version_2_alone(self.settings.sys_root):
                what = "before its job's first step a session by ssh opens every card"
                found.append(warning(what, "see docs/isolation.md"))
        elif not self.constrains():
            what = "a session by ssh opens every card, and has no mask"
            found.append(warning(what, "ConstrainDevices=yes in cgroup.conf, or ISOLATION=cgroup"))
        elif (
            "action_adopt_failure=deny" not in adopting[0] or "action_unknown=allow" in adopting[0]
        ):
            what = "a session that is not adopted goes on, and opens every card"
            do = "action_adopt_failure=deny, and no action_unknown=allow, in its line"
            found.append(warning(what, f"{do} of {SSHD_STACK}"))
        opens = "no card" if by_cgroup else "its job's cards alone, and has no mask"
        yield from found or [ok(f"a session by ssh opens {opens}")]

    def flag(self) -> Iterator[Check]:
        """Look whether Slurm, too, tells jobs which cards are theirs."""
        if self.gres_conf is None:
            yield warning(f"not at {self.site.gres_conf}", "GPUs need File= lines there")
            return
        nodes = self.site.node_names()
        flagged = gres.has_gres_flag(self.gres_conf, nodes)
        if self.by_slurm and any("no_gpu_env" in f for f in gres.gpu_flags(self.gres_conf, nodes)):
            what = "no_gpu_env, but SLURM_DEVICE_SELECTION=slurm: only TaskProlog names the cards"
            yield warning(what, "take Flags=no_gpu_env out, and restart slurmd")
        elif not self.by_slurm and self.settings.slurm_count == "gpus" and not flagged:
            what = "without no_gpu_env, but SLURM_DEVICE_SELECTION=gpulock: Slurm names cards too"
            do = "Flags=no_gpu_env on each Name=gpu line; restart slurmd, do not reconfigure"
            yield fault(what, do)
        else:
            yield ok(str(self.gres_conf))

    def map(self) -> Iterator[Check]:
        """Compare the map with slurmd's list, and Slurm's numbers with CUDA's."""
        listed = self.listed()
        entries, shared = listed.entries, listed.shared
        needed = needs_gres_map(Node(self.settings).devices_if_driver(), self.settings)
        if not entries and gres.counts_by_gres(self.settings):
            if why := gres.find_unlisted_gpus(self.site):
                if needed:
                    yield fault(f"{why}: no GPU job starts here", gres.LOOK_AT_LIST)
                    return
                yield warning(why, gres.LOOK_AT_LIST)
            else:
                what = "slurmd has no gres/gpu with File= here: no job gets a GPU"
                yield warning(what, "if one should: look at gres.conf, and Gres= in slurm.conf")
        if not needed:
            yield from self.unnamed_parts(shared)  # the hooks read no position
            return
        places = gres.GresDeviceFiles(self.settings).devices_of_positions(
            gres.gres_positions(entries)
        )
        yield from self.stale(places, shared)
        if self.by_slurm and places and not self.constrains() and not self.by_uuid():
            yield from self.order(entries, places)

    def unnamed_parts(self, shared: tuple[str, ...]) -> Iterator[Check]:
        """Look whether the Prolog knows by the map which GRES are parts of GPUs."""
        if unnamed := sorted({*shared} - {*read_shared_gres(self.settings.state_dir)}):
            name = f"gres/{', gres/'.join(unnamed)}"
            path = Path(self.settings.state_dir) / NAME
            yield fault(f"{path} lacks {name}: a job that asks for it gets a whole one", _AGAIN)

    def by_uuid(self) -> bool:
        """Say whether Slurm's masks name cards by UUID, in whatever order (26.05 and later)."""
        nodes = self.site.node_names()
        return bool(self.gres_conf and gres.has_gres_flag(self.gres_conf, nodes, "env_uuid"))

    def shares(self) -> Iterator[Check]:
        """Look whether slurmd gives out parts of GPUs, and whether jobs can have them."""
        shared = self.listed().shared if gres.counts_by_gres(self.settings) else ()
        if not shared:
            return
        name = f"gres/{', gres/'.join(shared)}"
        do = "take it out of GresTypes, Gres= and gres.conf, and restart all daemons"
        chosen = self.settings.slurm_shards
        if chosen == "share" and not self.by_slurm:
            what = "SLURM_SHARDS=share, with SLURM_DEVICE_SELECTION=gpulock: such jobs are refused"
            yield fault(what, "set SLURM_DEVICE_SELECTION=slurm", name)
        elif chosen == "share" and shared != (SHARD,):
            what = "shard jobs share a card's lock, but a job that asks for mps ends at once"
            yield warning(what, "take mps out: beside it 22.05 tells no shard job's card", name)
        elif chosen == "share":
            billed = (
                "" if self.settings.shares else "; their GPU hours are not known without SHARES"
            )
            yield ok(f"shard jobs share a card's lock{billed}", name)
        elif "SLURM_SHARDS" in self.settings.given:
            yield warning("SLURM_SHARDS=refuse: a job that asks for it ends at once", do, name)
        else:
            what = "SLURM_SHARDS is not set: a job that asks for a part of a GPU ends at once"
            yield fault(what, f"set SLURM_SHARDS=share; or {do}", name)

    def counted(self) -> Iterator[Check]:
        """Compare what Slurm counts by type with what this node has, where gpulock selects."""
        if self.by_slurm:
            return
        found = Node(self.settings).devices_if_driver()
        by_position = gres.counts_by_gres(self.settings)
        listed = self.listed()
        counted = {} if by_position else listed.counted
        names = ["gpu"] if by_position else self.settings.slurm_gres
        for name, count in (gres.count_typed_gpus(listed.entries) | counted).items():
            gres_name, _, word = name.partition(":")
            if gres_name not in names:
                continue
            there = count_gres_type(found, self.settings, word)
            if count == there:
                yield ok(f"{count} of {name}")
            else:
                more = "jobs are sent back" if there else "such jobs fail"
                more = "such jobs get other GPUs" if by_position else more
                becomes = more if count > there else "no job gets the rest"
                what = f"Slurm counts {count} of {name}, this node has {there}: {becomes}"
                yield warning(what, f"Count={there} in gres.conf and Gres=; restart all daemons")
        if place_gres_page(self.settings, found, counted, ""):
            what = "SHARES is set, and Slurm counts no places: no job can ask for one"
            yield warning(what, f"{_AGAIN}: it prints the lines for slurm.conf and gres.conf")

    def stale(self, wanted: list[str], shared: tuple[str, ...]) -> Iterator[Check]:
        """Compare the map with what it would be now."""
        path = Path(self.settings.state_dir) / NAME
        try:
            pairs = read_map_pairs(self.settings.state_dir)
        except Refusal as refusal:
            missing = isinstance(refusal.__cause__, FileNotFoundError)
            what = f"no {path}" if missing else refusal.why
            yield fault(f"{what}: every GPU job drains the node", _AGAIN)
            return
        places = {str(number): place for number, place in enumerate(wanted)}
        if (map_positions(pairs), pairs.get(SHARED, "")) != (places, " ".join(shared)):
            what = f"{path} is not slurmd's list of now: jobs are refused, or share cards"
            yield fault(what, f"scontrol reconfigure, then {_AGAIN}")
        elif is_gres_conf_changed(pairs) or pairs.get(GRES_CONF, "") != str(self.gres_conf or ""):
            what = f"{self.gres_conf} changed since it was compared: GPU jobs are sent back"
            yield fault(what, f"start gpulockd, which compares it; or {_AGAIN}")
        elif places:
            yield ok(f"{len(places)} positions, as slurmd has them")

    def order(self, entries: list[gres.GresEntry], places: list[str]) -> Iterator[Check]:
        """Look whether position N is the card that CUDA calls N."""
        name = "order of gres.conf"
        if any("." in place for place in places):
            what = "MIG instances by number, and no ConstrainDevices: no mask of Slurm's is right"
            yield warning(what, "ConstrainDevices=yes in cgroup.conf, TaskPlugin=task/cgroup", name)
            return
        shown = devices.read_devices(self.settings.driver_root, self.settings.sys_root)
        index = {device.minor: device.index for device in shown}
        real = [index.get(int(place), -1) for place in places]
        if real == list(range(len(real))):
            yield ok("Slurm's numbers are CUDA's", name)
            return
        first = next(n for n, found in enumerate(real) if n != found)
        what = f"Slurm's GPU {first} is card {real[first]} to CUDA: jobs use each other's cards"
        if sorted(real) == list(range(len(real))):
            do = f"{order_gres_files(entries, real)}; or ConstrainDevices=yes; restart slurmd"
        else:
            do = "name all cards in gres.conf, in the order of the PCI bus, or ConstrainDevices=yes"
        yield fault(what, f"{do}, then {_AGAIN}", name)

    def detection(self) -> Iterator[Check]:
        """Warn where the list can change without gres.conf."""
        if self.gres_conf is None:
            return
        found = read_node_values(self.gres_conf, "AutoDetect", self.site.node_names())
        if any(word.lower() != "off" for word in found):
            what = (
                "slurmd lists the cards that it finds when it starts; the map is of one such time"
            )
            do = f"after a card was changed or lost, {_AGAIN}; or write File= lines"
            yield warning(what, do)


def has_pam_module(words: list[str], module: str) -> bool:
    """Return whether a line of a PAM stack calls a module; pure."""
    return any(word.rpartition("/")[2] == f"{module}.so" for word in words)


def order_gres_files(entries: list[gres.GresEntry], real: list[int]) -> str:
    """Return gres.conf's File= in the order of the PCI bus; pure."""
    files = [files[0] for files in gres.gres_positions(entries)]
    ordered = [files[real.index(number)] for number in range(len(real))]
    types = {entry.type for entry in entries}
    if len(types) > 1:
        return f"in gres.conf, and types in slurm.conf's Gres= likewise: {' '.join(ordered)}"
    return f"in gres.conf: File={','.join(ordered)}"
