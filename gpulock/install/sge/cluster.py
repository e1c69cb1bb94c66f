# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge --cluster`, and `uninstall`: what a manager does once for all hosts.

No file is put on this machine. The hooks are set for the hosts of a group, into which each comes
by its own `gpulock install sge`, once its part is in place: so no line leads to a hook that is
missing. One attribute is written at a time; the table of complexes is taken whole alone
(docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

import re
from pathlib import Path

from gpulock.install.files import InstallError, read_file
from gpulock.install.items import ByHand, Item, Remainder, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.sge.complexes import Complexes, check_complexes, cluster_complexes
from gpulock.install.sge.host import REPORTED
from gpulock.install.sge.qconf import Qconf
from gpulock.install.sge.queue_hooks import GROUP, HOOKS, GroupHook
from gpulock.install.sge.site import OCS, check_release, find_own_execd, find_qmaster
from gpulock.install.versions import current_hooks


class HostGroup(Item):
    """The host group of all hosts on which gpulock is installed."""

    title = f"host group {GROUP}"
    text = "(without a host)"

    def __init__(self, qconf: Qconf) -> None:
        self.qconf = qconf

    def read(self) -> str | None:
        return self.text if GROUP in self.qconf.names("-shgrpl") else None

    def write(self, wanted: Wanted) -> None:
        if wanted is Wanted.PRESENT:
            self.qconf.load("-Ahgrp", "group", f"group_name {GROUP}\nhostlist NONE\n")
        else:
            self.qconf.run("qconf", "-dhgrp", GROUP)


class ClusterInstaller(NodePart):
    """Find out what is to be there in the cluster, or to go from it."""

    on_node = False

    def __init__(self, config: Path, queues: tuple[str, ...] = ()) -> None:
        super().__init__(config, "sge")
        self.queues = queues
        self.qconf = find_qmaster(self.settings, find_own_execd(self.settings))
        self.current = current_hooks(self.settings).folder

    def parts(self) -> list[Item]:
        check_release(self.qconf.release())
        there = self.qconf.names("-sql")
        if missing := [queue for queue in self.queues if queue not in there]:
            known, queue = " ".join(there) or "none", missing[0]
            raise InstallError(
                f"there is no queue {queue} (there is: {known}); make it: qconf -aq {queue}"
            )
        lines, hooks = cluster_complexes(self.settings), self.hooks(self.queues)
        check_complexes(self.qconf.complexes(), lines)
        for one in hooks:
            one.goal(Wanted.PRESENT)  # refused before anything is written
            if site := one.site_command():
                what = f"{one.queue}: the {one.hook} in force keeps running, with gpulock's: {site}"
                self.note(f"{what}; if it hands out GPUs itself, take it out")
        text = read_file(self.qconf.common("bootstrap")) or ""
        user = (re.findall(r"(?m)^admin_user\s+(\S+)", text) or ["none"])[0]
        if user.lower() not in ("none", "root") and not self.qconf.release().startswith(OCS):
            what = f"admin_user is {user}: qlogin, and qrsh without a command, are refused"
            self.note(f"{what} on these hosts; see docs/grid-engine.md, interactive jobs")
        self.note("on each execution host of the queue, now: gpulock install sge")
        return [Complexes(self.qconf, lines), HostGroup(self.qconf), *hooks]

    def removal(self) -> list[Item]:
        """Return what is to go, of all queues."""
        table = self.qconf.complexes()
        if left := [name for name in (*self.settings.sge_complexes, *REPORTED) if name in table]:
            self.note(f"complexes stay, for the site's jobs may name them: {' '.join(left)}")
        hooks = self.hooks(tuple(self.qconf.names("-sql")))
        members = ByHand(f"hosts of {GROUP}", self.members_left)
        return [HostGroup(self.qconf), *hooks, members]

    def members_left(self) -> Remainder | None:
        """Return the hosts that are in the group: each leaves it by its own uninstallation."""
        hosts = " ".join(self.qconf.hosts_of_group(GROUP))
        do = "run gpulock uninstall sge on each, then this again"
        return Remainder(f"hosts are in {GROUP}: {hosts}; {do}") if hosts else None

    def hooks(self, queues: tuple[str, ...]) -> list[GroupHook]:
        """Return each queue's hooks for the group."""
        qconf, current = self.qconf, self.current
        return [GroupHook(qconf, current, queue, hook) for hook in HOOKS for queue in queues]
