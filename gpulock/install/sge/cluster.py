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
from gpulock.install.items import InstallParts, Item, Remainder, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.sge.complexes import REPORTED, check_complexes, cluster_complexes
from gpulock.install.sge.qconf import Qconf, QconfError, is_sge_none
from gpulock.install.sge.queue_hooks import GROUP, HOOKS, GroupHook, HookLine
from gpulock.install.sge.site import check_release, find_own_execd, find_sge_site
from gpulock.install.versions import current_hooks

VERIFIER: Final = "prolog/sge-jsv"


class Complexes(Item):
    """The complexes that count GPUs and tell of them; they stay, for the site's jobs name them."""

    title = "table of complexes"

    def __init__(self, qconf: Qconf, lines: Mapping[str, str]) -> None:
        self.qconf, self.lines = qconf, lines

    def show(self, wanted: Wanted) -> list[str]:
        if wanted is Wanted.ABSENT:
            return []
        table = self.qconf.complexes()
        return [f"  + {line}" for name, line in self.lines.items() if name not in table]

    def present(self) -> None:
        """Add what is missing in one write, which is compared just before."""
        before = self.qconf.complexes()
        table = "\n".join({**self.lines, **before}.values()) + "\n"
        if self.qconf.complexes() != before:
            raise QconfError("others write it; run it again")
        self.qconf.load("-Mc", "complexes", table)


class HostGroup(Item):
    """The host group of all hosts on which gpulock is installed."""

    title = f"host group {GROUP}"

    def __init__(self, qconf: Qconf) -> None:
        self.qconf = qconf

    def show(self, wanted: Wanted) -> list[str]:
        there = GROUP in self.qconf.names("-shgrpl")
        if there is (wanted is Wanted.PRESENT):
            return []
        return ["  - (no host is in it)" if there else "  + (without a host)"]

    def present(self) -> None:
        self.qconf.load("-Ahgrp", "group", f"group_name {GROUP}\nhostlist NONE\n")

    def absent(self) -> None:
        self.qconf.run("qconf", "-dhgrp", GROUP)


class GroupMembers(Item):
    """The hosts that are in the group: each leaves it by its own uninstallation."""

    title = f"hosts of {GROUP}"

    def __init__(self, qconf: Qconf, needs: tuple[Item, ...]) -> None:
        self.qconf, self.needs = qconf, needs

    def remainder(self, wanted: Wanted) -> Remainder | None:
        hosts = self.qconf.hosts_of_group(GROUP) if wanted is Wanted.ABSENT else []
        if not hosts:
            return None
        what = f"hosts are in {GROUP}: {' '.join(hosts)}"
        return Remainder(f"{what}; run gpulock uninstall sge on each, then this again")


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
        if is_sge_none((self.qconf.configuration("global") or {}).get("jsv_url")):
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
        return InstallParts(items, self.notes, on_node=False)

    def items(self, queues: tuple[str, ...]) -> list[Item]:
        """Return the group, each queue's hooks for it, and the hosts that keep both."""
        group = HostGroup(self.qconf)
        hooks: list[Item] = [
            GroupHook(self.qconf, queue, HookLine(self.current, hook), (group,))
            for hook in HOOKS
            for queue in queues
        ]
        return [group, *hooks, GroupMembers(self.qconf, (group, *hooks))]
