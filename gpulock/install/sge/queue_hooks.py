# SPDX-License-Identifier: Apache-2.0
"""Prolog and epilog of a queue: for all hosts of the group, and in force on one host.

A host that joins or leaves a host group has the group's hook, or none, once that very attribute of
the queue is written again (docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import Item, Wanted, difference_lines
from gpulock.install.sge.host import SgeHost
from gpulock.install.sge.qconf import Qconf, is_sge_none, parse_host_overrides
from gpulock.install.sge.texts import (
    HOOKS,
    INHERITED,
    OWN,
    HookLine,
    is_gpulock_command,
    make_hook_line,
    parse_hook_line,
)

GROUP: Final = "@gpulock"


class QueueHook(Item):
    """One hook of a queue, as a domain of it (a host group, a host) has it."""

    def __init__(
        self, qconf: Qconf, queue: str, domain: str, line: HookLine, needs: tuple[Item, ...]
    ) -> None:
        self.qconf, self.queue, self.domain = qconf, queue, f"{queue}@{domain}"
        self.current, self.hook, self.needs = line.current, line.hook, needs
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

    def refusal(self, now: str) -> InstallError:
        """Return what is to be said of a line that only a person can judge."""
        do = f"qconf -purge queue {self.hook} {self.domain}, and run it again"
        return InstallError(f"{self.title} is {now}, which gpulock does not replace: {do}")


class GroupHook(QueueHook):
    """A hook of a queue on all hosts of the group."""

    def __init__(self, qconf: Qconf, queue: str, line: HookLine, needs: tuple[Item, ...]) -> None:
        super().__init__(qconf, queue, GROUP, line, needs)

    def line(self) -> HookLine:
        """Return our line, around the command that is in force without it; raise InstallError."""
        default = self.values()[0]
        if is_sge_none(default):
            default = (self.qconf.configuration("global") or {}).get(self.hook, "")
        site = "" if is_sge_none(default) else default
        return make_hook_line(self.current, self.hook, site, INHERITED)

    def show(self, wanted: Wanted) -> list[str]:
        now = self.values()[1].get(GROUP)
        if now is not None and parse_hook_line(now, self.hook) is None:
            raise self.refusal(now)
        return difference_lines(now, self.line().text() if wanted is Wanted.PRESENT else None)

    def present(self) -> None:
        self.set(self.line().text())

    def absent(self) -> None:
        self.set(None)


class HostHook(QueueHook):
    """A hook of a queue in force on this host: the group's, or one of the host's own.

    The host has a line of its own where it had one before, where another group would make the
    group's ambiguous, and where its configuration names another hook of the site's.
    """

    def __init__(self, host: SgeHost, queue: str, hook: str, needs: tuple[Item, ...]) -> None:
        super().__init__(host.qconf, queue, host.name, HookLine(host.current, hook), needs)
        self.host = host

    def in_force(self) -> str | None:
        """Return the queue's value on this host."""
        value = self.qconf.show("-sq", self.domain)[self.hook]
        return None if is_sge_none(value) else value

    def own_line(self, default: str, domains: Mapping[str, str]) -> HookLine | None:
        """Return the line that the host needs of its own, None where the group's will do.

        Raises InstallError for a line that says that no hook runs, or that somebody edited.
        """
        own = domains.get(self.host.name)
        ours = parse_hook_line(own, self.hook)
        if ours and ours.origin == OWN:
            return make_hook_line(self.current, self.hook, ours.site, OWN)
        if own is not None and not ours:
            if is_sge_none(own) or is_gpulock_command(own, self.hook):
                raise self.refusal(own)
            return make_hook_line(self.current, self.hook, own, OWN)
        group = parse_hook_line(domains[GROUP], self.hook)
        others = [name for name in domains if name.startswith("@") and name != GROUP]
        others = [name for name in others if self.host.name in self.qconf.hosts_of_group(name)]
        below = (self.host.configuration() or {}).get(self.hook)
        if others:
            below = domains[others[0]]
        elif below is None or not is_sge_none(default):
            return None
        site = "" if is_sge_none(below) else below
        if group and group.site == site and not others:
            return None
        return make_hook_line(self.current, self.hook, site, INHERITED)

    def is_member(self) -> bool:
        """Say whether the host is in our group."""
        return self.host.name in self.qconf.hosts_of_group(GROUP)

    def show(self, wanted: Wanted) -> list[str]:
        default, domains = self.values()
        now, joined = self.in_force(), f"{self.host.name} in {GROUP}"
        if wanted is Wanted.PRESENT:
            if parse_hook_line(domains.get(GROUP), self.hook) is None:
                return []
            line = self.own_line(default, domains)
            join = [] if line or self.is_member() else [f"  + {joined}"]
            return [*difference_lines(now, line.text() if line else domains[GROUP]), *join]
        own = parse_hook_line(domains.get(self.host.name), self.hook)
        ours = own or (is_gpulock_command(now, self.hook) and now == domains.get(GROUP))
        gone = difference_lines(now, own.before() if own else None) if ours else []
        leaves = GROUP in domains and self.is_member()
        return [*gone, *([f"  - {joined}"] if leaves else [])]

    def present(self) -> None:
        self.host.await_configuration(sensor=True)
        default, domains = self.values()
        if line := self.own_line(default, domains):
            self.set(line.text())
            return
        if not self.is_member():
            self.qconf.run("qconf", "-aattr", "hostgroup", "hostlist", self.host.name, GROUP)
        if self.host.name in domains:
            self.set(None)
        self.write_group_again(domains)

    def absent(self) -> None:
        _, domains = self.values()
        if self.is_member():
            self.qconf.run("qconf", "-dattr", "hostgroup", "hostlist", self.host.name, GROUP)
        if own := parse_hook_line(domains.get(self.host.name), self.hook):
            self.set(own.before())
        elif self.in_force() == domains[GROUP]:
            self.write_group_again(domains)

    def write_group_again(self, domains: Mapping[str, str]) -> None:
        """Have qmaster look again which hosts are in the group: only then its line counts here."""
        words = (self.hook, domains[GROUP], f"{self.queue}@{GROUP}")
        self.qconf.run("qconf", "-rattr", "queue", *words)


def hooked_queues(host: SgeHost) -> dict[str, Path]:
    """Return where the hooks lead that a queue of this host has for the group, by queue."""
    found: dict[str, Path] = {}
    for queue in host.queues():
        shown = host.qconf.show("-sq", queue)
        lines = [parse_hook_line(parse_host_overrides(shown[h])[1].get(GROUP), h) for h in HOOKS]
        paths = {line.current if line else None for line in lines}
        if len(paths) == 1 and (path := paths.pop()):
            found[queue] = path
    return found
