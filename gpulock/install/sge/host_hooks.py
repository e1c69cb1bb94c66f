# SPDX-License-Identifier: Apache-2.0
"""Prolog and epilog in force on one host, and the lines of the site's own that lead to them.

A host that joins or leaves a host group has the group's hook, or none, once that very attribute of
the queue is written again (docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from gpulock.install.items import Item, Remainder, Wanted, difference_lines
from gpulock.install.sge.cluster_items import GROUP, QueueHook, group_hosts
from gpulock.install.sge.host_items import CONF_LINES, SgeHost
from gpulock.install.sge.qconf import is_sge_none, parse_host_overrides
from gpulock.install.sge.qmaster import queues_of_host
from gpulock.install.sge.texts import (
    HOOKS,
    OWN,
    HookLine,
    is_gpulock_command,
    parse_hook_line,
)


class HostHook(QueueHook):
    """A hook of a queue in force on this host: the group's, or one of the host's own.

    The host has a line of its own where it had one before, where another group would make the
    group's ambiguous, and where its configuration names another hook of the site's.
    """

    def __init__(self, host: SgeHost, queue: str, hook: str, needs: tuple[Item, ...]) -> None:
        super().__init__(host.qconf, queue, host.name, HookLine(host.current, hook))
        self.host, self.needs = host, needs

    def in_force(self) -> str | None:
        """Return the queue's value on this host."""
        value = self.qconf.show("-sq", self.domain)[self.hook]
        return None if is_sge_none(value) else value

    def own_line(self, default: str, domains: Mapping[str, str]) -> HookLine | None:
        """Return the line that the host needs of its own, None where the group's will do."""
        own = domains.get(self.host.name)
        ours = parse_hook_line(own, self.hook)
        if own is not None and (ours is None or ours.origin == OWN):
            return self.chain(own, None)
        group = parse_hook_line(domains[GROUP], self.hook)
        others = [name for name in domains if name.startswith("@") and name != GROUP]
        others = [name for name in others if self.host.name in group_hosts(self.qconf, name)]
        below = (self.host.configuration() or {}).get(self.hook)
        if others:
            below = domains[others[0]]
        elif below is None or not is_sge_none(default):
            return None
        site = "" if is_sge_none(below) else below
        return None if group and group.site == site and not others else self.chain(None, site)

    def is_member(self) -> bool:
        """Say whether the host is in our group."""
        return self.host.name in group_hosts(self.qconf, GROUP)

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
        gone = difference_lines(now, own.site if own and own.origin == OWN else None)
        leaves = GROUP in domains and self.is_member()
        return [*(gone if ours else []), *([f"  - {joined}"] if leaves else [])]

    def present(self) -> None:
        self.host.report.await_configuration(sensor=True)
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
            self.set(own.site if own.origin == OWN else None)
        elif self.in_force() == domains[GROUP]:
            self.write_group_again(domains)

    def write_group_again(self, domains: Mapping[str, str]) -> None:
        """Have qmaster look again which hosts are in the group: only then its line counts here."""
        words = (self.hook, domains[GROUP], f"{self.queue}@{GROUP}")
        self.qconf.run("qconf", "-rattr", "queue", *words)


class SiteLines(Item):
    """Lines that the site wrote itself, and that lead to gpulock's files."""

    title = "lines of the site's that lead here"

    def __init__(self, host: SgeHost, is_master: bool, needs: tuple[Item, ...]) -> None:
        self.host, self.is_master, self.needs = host, is_master, needs

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.PRESENT:
            return None
        calls = [*self._queues(), *self._configurations()]
        what = "lines of the site's lead to gpulock: make the calls above, and run it again"
        return Remainder(what, calls) if calls else None

    def _queues(self) -> Iterator[str]:
        """Yield the call that takes our hook out of each line of a queue, but for the items'."""
        for queue in queues_of_host(self.host.qconf, self.host.name):
            shown = self.host.qconf.show("-sq", queue)
            for hook in HOOKS:
                default, domains = parse_host_overrides(shown[hook])
                for domain, value in {"": default, **domains}.items():
                    line = parse_hook_line(value, hook)
                    is_item = line and domain in (GROUP, self.host.name)
                    is_here = domain in ("", self.host.name) or domain.startswith("@")
                    if is_here and self.host.is_ours(value) and not is_item:
                        site = shlex.quote((line.site if line else "") or "NONE")
                        where = f"{queue}@{domain}" if domain else queue
                        yield f"qconf -rattr queue {hook} {site} {where}"

    def _configurations(self) -> Iterator[str]:
        """Yield what to change in the configurations; jsv_url leads to qmaster's own files."""
        names = [*CONF_LINES, *HOOKS, *(["jsv_url"] if self.is_master else [])]
        shared, own = self.host.shared(), self.host.configuration() or {}
        for lines, where, known in ((shared, "", names), (own, f" {self.host.name}", HOOKS)):
            for name in known:
                if self.host.is_ours(lines.get(name)) and (where or name not in own):
                    yield f"qconf -mconf{where}: {name} {self.host.without_ours(lines[name])}"
