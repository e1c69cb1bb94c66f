# SPDX-License-Identifier: Apache-2.0
"""The cluster's part, written once by a manager: complexes, a host group, and its two hooks.

A host is in the group once its own part is in place, so no line leads to a hook that is missing.
One attribute is written at a time; the table of complexes is taken whole alone (docs/facts/
grid-engine.md, configuration changes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import Item, Remainder, Scope, Wanted, difference_lines
from gpulock.install.sge.qconf import Qconf, QconfError, is_sge_none, parse_host_overrides
from gpulock.install.sge.qmaster import read_complexes
from gpulock.install.sge.texts import (
    INHERITED,
    OWN,
    HookLine,
    is_gpulock_command,
    make_hook_line,
    parse_hook_line,
)

GROUP: Final = "@gpulock"
_TRIES: Final = 5  # to add complexes beside others who write the table


class Complexes(Item):
    """The complexes that count GPUs and tell of them; they stay, for the site's jobs name them."""

    title, scope = "table of complexes", Scope.CLUSTER

    def __init__(self, qconf: Qconf, lines: Mapping[str, str]) -> None:
        self.qconf, self.lines = qconf, lines

    def missing(self) -> dict[str, str]:
        """Return the lines that are not there; raise QconfError."""
        table = read_complexes(self.qconf)
        return {name: line for name, line in self.lines.items() if name not in table}

    def show(self, wanted: Wanted) -> list[str]:
        if wanted is Wanted.ABSENT:
            return []
        return [f"  + {line}" for line in self.missing().values()]

    def present(self) -> None:
        """Add what is missing in one write, which is compared just before."""
        for _ in range(_TRIES):
            before = read_complexes(self.qconf)
            if self.lines.keys() <= before.keys():
                return
            table = {**self.lines, **before}
            if read_complexes(self.qconf) == before:
                self.qconf.load("-Mc", "complexes", "\n".join(table.values()) + "\n")
        raise QconfError("others write it; run it again")


class HostGroup(Item):
    """The host group of all hosts on which gpulock is installed."""

    title, scope = f"host group {GROUP}", Scope.CLUSTER

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

    title, scope = f"hosts of {GROUP}", Scope.CLUSTER

    def __init__(self, qconf: Qconf, needs: tuple[Item, ...]) -> None:
        self.qconf, self.needs = qconf, needs

    def remainder(self, wanted: Wanted) -> Remainder | None:
        hosts = group_hosts(self.qconf, GROUP) if wanted is Wanted.ABSENT else []
        if not hosts:
            return None
        what = f"hosts are in {GROUP}: {' '.join(hosts)}"
        return Remainder(f"{what}; run gpulock uninstall sge on each, then this again")


class QueueHook(Item):
    """One hook of a queue, as a domain of it (a host group, a host) has it."""

    scope = Scope.CLUSTER

    def __init__(self, qconf: Qconf, queue: str, domain: str, line: HookLine) -> None:
        self.qconf, self.queue, self.domain = qconf, queue, f"{queue}@{domain}"
        self.current, self.hook = line.current, line.hook
        self.title = f"{self.hook} of queue {self.domain}"

    def values(self) -> tuple[str, dict[str, str]]:
        """Return the queue's own value and those of domains; raise QconfError."""
        return parse_host_overrides(self.qconf.show("-sq", self.queue)[self.hook])

    def set(self, value: str | None) -> None:
        """Give the domain a value of its own, or none."""
        words = ["-purge", "queue", self.hook, self.domain]
        if value is not None:
            words = ["-rattr", "queue", self.hook, value, self.domain]
        self.qconf.run("qconf", *words)

    def chain(self, now: str | None, inherited: str | None) -> HookLine:
        """Return our line around the site's command, which is in the line now or is inherited.

        Raises InstallError for a line that says that no hook runs, or that somebody edited.
        """
        ours = parse_hook_line(now, self.hook)
        if ours and ours.origin == OWN:
            return make_hook_line(self.current, self.hook, ours.site, OWN)
        if ours or now is None:
            return make_hook_line(self.current, self.hook, inherited or "", INHERITED)
        if is_sge_none(now) or is_gpulock_command(now, self.hook):
            do = f"qconf -purge queue {self.hook} {self.domain}, and run it again"
            raise InstallError(f"{self.title} is {now}, which gpulock does not replace: {do}")
        return make_hook_line(self.current, self.hook, now, OWN)


class GroupHook(QueueHook):
    """A hook of a queue on all hosts of the group."""

    def __init__(self, qconf: Qconf, queue: str, line: HookLine, needs: tuple[Item, ...]) -> None:
        super().__init__(qconf, queue, GROUP, line)
        self.needs = needs

    def line(self, default: str, domains: Mapping[str, str]) -> HookLine:
        """Return the group's line, around the site's command; raise InstallError."""
        shared = (self.qconf.configuration("global") or {}).get(self.hook)
        inherited = shared if is_sge_none(default) else default
        return self.chain(domains.get(GROUP), None if is_sge_none(inherited) else inherited)

    def wanted(self, wanted: Wanted) -> tuple[str | None, str | None]:
        """Return what the group's line is, and what it is to be; raise InstallError."""
        default, domains = self.values()
        now = domains.get(GROUP)
        if wanted is Wanted.PRESENT:
            return now, self.line(default, domains).text()
        ours = parse_hook_line(now, self.hook)
        return now, now if ours is None else ours.site if ours.origin == OWN else None

    def show(self, wanted: Wanted) -> list[str]:
        return difference_lines(*self.wanted(wanted))

    def present(self) -> None:
        self.set(self.wanted(Wanted.PRESENT)[1])

    def absent(self) -> None:
        self.set(self.wanted(Wanted.ABSENT)[1])


def group_hosts(qconf: Qconf, group: str) -> list[str]:
    """Return the hosts of a host group, none where there is no such group; raise QconfError."""
    if group not in qconf.names("-shgrpl"):
        return []
    return qconf.run("qconf", "-shgrp_resolved", group).split()
