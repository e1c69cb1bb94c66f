# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge --cluster`, and `uninstall`: what a manager does once for all hosts.

No file is put on this machine. The hooks are set for the hosts of a group, into which each comes
by its own `gpulock install sge`, once its part is in place: so no line leads to a hook that is
missing. One attribute is written at a time; the table of complexes is taken whole alone
(docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import ByHand, InstallParts, Item, Remainder, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.sge.host import REPORTED, check_complexes, cluster_complexes
from gpulock.install.sge.qconf import Qconf, is_sge_none
from gpulock.install.sge.queue_hooks import GROUP, HOOKS, GroupHook, HookLine
from gpulock.install.sge.site import check_release, find_own_execd, find_sge_site
from gpulock.install.versions import current_hooks

VERIFIER: Final = "prolog/sge-jsv"


class Complexes(Item):
    """The complexes that count GPUs and tell of them; they stay, for the site's jobs name them."""

    title = "table of complexes"

    def __init__(self, qconf: Qconf, lines: Mapping[str, str]) -> None:
        self.qconf, self.lines = qconf, lines

    def read(self) -> str | None:
        table = self.qconf.complexes()
        return "\n".join(table[name] for name in self.lines if name in table)

    def goal(self, wanted: Wanted) -> str | None:
        table = {**self.lines, **self.qconf.complexes()}
        return "\n".join(table[name] for name in self.lines)

    def present(self) -> None:
        """Add what is missing to the table of this moment, in one write."""
        table = {**self.lines, **self.qconf.complexes()}
        self.qconf.load("-Mc", "complexes", "\n".join(table.values()) + "\n")


class HostGroup(Item):
    """The host group of all hosts on which gpulock is installed."""

    title = f"host group {GROUP}"

    def __init__(self, qconf: Qconf) -> None:
        self.qconf = qconf

    def read(self) -> str | None:
        return "(without a host)" if GROUP in self.qconf.names("-shgrpl") else None

    def goal(self, wanted: Wanted) -> str | None:
        return "(without a host)" if wanted is Wanted.PRESENT else None

    def present(self) -> None:
        self.qconf.load("-Ahgrp", "group", f"group_name {GROUP}\nhostlist NONE\n")

    def absent(self) -> None:
        self.qconf.run("qconf", "-dhgrp", GROUP)


class ClusterInstaller(NodePart):
    """Find out what is to be there in the cluster, or to go from it."""

    def __init__(self, config: Path, queues: tuple[str, ...] = ()) -> None:
        super().__init__(config, "sge")
        self.queues = queues
        execd = find_own_execd(self.settings)
        self.site = find_sge_site(self.settings, execd)
        self.qconf = self.site.qconf()
        self.current = current_hooks(self.settings).folder

    def parts(self) -> InstallParts:
        """Return what is to be there; raise InstallError for what cannot be installed."""
        check_release(self.site.release())
        there = self.qconf.names("-sql")
        for queue in self.queues:
            if queue not in there:
                known, make = " ".join(there) or "none", f"qconf -aq {queue}"
                raise InstallError(
                    f"there is no queue {queue} (there is: {known}); make it: {make}"
                )
        lines = cluster_complexes(self.settings)
        check_complexes(self.qconf.complexes(), lines)
        items = self.items(self.queues)
        for item in items:
            if isinstance(item, GroupHook) and (site := item.line().site):
                what = (
                    f"{item.queue}: the {item.hook} in force keeps running, with gpulock's: {site}"
                )
                self.note(f"{what}; if it hands out GPUs itself, take it out")
        if is_sge_none(self.qconf.shared_configuration().get("jsv_url")):
            wanted = f"script:{self.current}/{VERIFIER}"
            self.note(f"qconf -mconf: jsv_url {wanted} has qmaster refuse invalid requests")
        self.note("on each execution host of the queue, now: gpulock install sge")
        return InstallParts([Complexes(self.qconf, lines), *items], self.notes, on_node=False)

    def removal(self) -> InstallParts:
        """Return what is to go, of all queues."""
        table = self.qconf.complexes()
        if left := [name for name in (*self.settings.sge_complexes, *REPORTED) if name in table]:
            self.note(f"complexes stay, for the site's jobs may name them: {' '.join(left)}")
        items = self.items(tuple(self.qconf.names("-sql")))
        members = ByHand(f"hosts of {GROUP}", self.members_left)
        return InstallParts([*items, members], self.notes, on_node=False)

    def members_left(self) -> Remainder | None:
        """Return the hosts that are in the group: each leaves it by its own uninstallation."""
        hosts = " ".join(self.qconf.hosts_of_group(GROUP))
        do = "run gpulock uninstall sge on each, then this again"
        return Remainder(f"hosts are in {GROUP}: {hosts}; {do}") if hosts else None

    def items(self, queues: tuple[str, ...]) -> list[Item]:
        """Return the group, and each queue's hooks for it."""
        hooks = [
            GroupHook(self.qconf, queue, GROUP, HookLine(self.current, hook))
            for hook in HOOKS
            for queue in queues
        ]
        return [HostGroup(self.qconf), *hooks]
