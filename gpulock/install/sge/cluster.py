# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge --cluster`, and `uninstall`: what a manager does once for all hosts.

No file is put on this machine. The hooks are set for the hosts of a group, into which each comes
by its own `gpulock install sge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import InstallParts, Item
from gpulock.install.node_part import NodePart
from gpulock.install.sge.cluster_items import Complexes, GroupHook, GroupMembers, HostGroup
from gpulock.install.sge.host_report import REPORTED
from gpulock.install.sge.kinds import check_complexes, cluster_complexes
from gpulock.install.sge.programs import release_fault
from gpulock.install.sge.qconf import is_sge_none
from gpulock.install.sge.qmaster import read_complexes
from gpulock.install.sge.site import find_own_execd, find_sge_site
from gpulock.install.sge.texts import HOOKS, HookLine
from gpulock.install.trial import command_program, rival_hook_reason
from gpulock.install.versions import current_hooks
from gpulock.node.settings_file import DEFAULT_PATH

VERIFIER: Final = "prolog/sge-jsv"


@dataclass(frozen=True)
class ClusterOptions:
    """What the manager asks for; without queues all of the cluster's, which is for a removal."""

    config: Path = Path(DEFAULT_PATH)
    queues: tuple[str, ...] = ()


class ClusterInstaller(NodePart):
    """Find out what is to be there in the cluster, or to go from it."""

    def __init__(self, options: ClusterOptions) -> None:
        super().__init__(options.config, "sge")
        self.options = options
        execd = find_own_execd(self.settings, self.given)
        self.site = find_sge_site(self.settings, self.given, execd)
        self.qconf = self.site.qconf()
        self.current = current_hooks(self.settings).folder

    def parts(self) -> InstallParts:
        """Return what is to be there; raise InstallError for what cannot be installed."""
        if why := release_fault(self.site.release()):
            raise InstallError(f"{why}: nothing was installed (docs/grid-engine.md)")
        there = self.qconf.names("-sql")
        for queue in self.options.queues:
            if queue not in there:
                known, make = " ".join(there) or "none", f"qconf -aq {queue}"
                raise InstallError(
                    f"there is no queue {queue} (there is: {known}); make it: {make}"
                )
        lines = cluster_complexes(self.settings)
        check_complexes(read_complexes(self.qconf), lines)
        for queue in self.options.queues:
            self.note_site_hooks(queue)
        self.note_verifier()
        self.note("on each execution host of the queue, now: gpulock install sge")
        items = [Complexes(self.qconf, lines), *self.items(self.options.queues)]
        return InstallParts(items, self.notes)

    def removal(self) -> InstallParts:
        """Return what is to go, of all queues."""
        names = [*self.settings.sge_complexes, *REPORTED]
        if left := [name for name in names if name in read_complexes(self.qconf)]:
            self.note(f"complexes stay, for the site's jobs may name them: {' '.join(left)}")
        return InstallParts(self.items(tuple(self.qconf.names("-sql"))), self.notes)

    def items(self, queues: tuple[str, ...]) -> list[Item]:
        """Return the group, each queue's hooks for it, and the hosts that keep both."""
        group = HostGroup(self.qconf)
        hooks: list[Item] = [
            GroupHook(self.qconf, queue, HookLine(self.current, hook), (group,))
            for hook in HOOKS
            for queue in queues
        ]
        return [group, *hooks, GroupMembers(self.qconf, (group, *hooks))]

    def note_verifier(self) -> None:
        """Say how qmaster gets the verifier, which is a line of the global configuration."""
        if is_sge_none((self.qconf.configuration("global") or {}).get("jsv_url")):
            wanted = f"script:{self.current}/{VERIFIER}"
            self.note(f"qconf -mconf: jsv_url {wanted} has qmaster refuse invalid requests")

    def note_site_hooks(self, queue: str) -> None:
        """Say which hooks of the site's go on running, and what is odd about them."""
        for hook in HOOKS:
            item = GroupHook(self.qconf, queue, HookLine(self.current, hook), ())
            line = item.line(*item.values())
            if not line.site:
                continue
            self.note(f"{queue}: the {hook} in force keeps running, with gpulock's: {line.site}")
            program = command_program(line.site)
            if program.is_absolute() and not program.exists():
                self.note(f"{queue}: {program} does not exist here: jobs would fail as they do now")
            if why := rival_hook_reason(line.site):
                self.note(f"{queue}: does this {hook} hand out GPUs itself ({why})? Take it out")
