# SPDX-License-Identifier: Apache-2.0
"""Prolog and epilog of a queue: for all hosts of the group, and in force on one host.

The site's command stands in our line as it stood in its own, so Grid Engine goes on splitting it
and filling in its $variables; our hook runs it with its own user and environment.
`prolog/drop-env` stands first: whatever the job's environment holds, it starts.

A host that joins or leaves a host group has the group's hook, or none, once that very attribute of
the queue is written again (docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import Item, Remainder, Wanted, difference_lines
from gpulock.install.sge.host import SgeHost
from gpulock.install.sge.qconf import Qconf, is_sge_none, parse_host_overrides
from gpulock.install.trial import command_program

GROUP: Final = "@gpulock"
HOOKS: Final = ("epilog", "prolog")  # as they are set: no job may claim before there is an epilog
_SITE: Final = 6  # words before the site's: drop-env, our hook, those three, $job_owner


@dataclass(frozen=True)
class HookLine:
    """The command line of one of our hooks, with the site's own command that runs as well."""

    current: Path
    hook: str
    site: str = ""

    def text(self) -> str:
        """Return the line for a queue."""
        ours = f"{self.current}/prolog/drop-env {self.current}/{self.hook}/sge"
        behind = f" $job_owner {self.site}" if self.site else ""
        return f"root@{ours} $job_id $ja_task_id $queue{behind}"


def parse_hook_line(value: str | None, hook: str) -> HookLine | None:
    """Return a line as gpulock writes it, None for one that is the site's or was edited; pure."""
    words = (value or "").split()
    if not is_gpulock_command(value, hook):
        return None
    current = Path(words[1].removesuffix(f"/{hook}/sge"))
    line = HookLine(current, hook, " ".join(words[_SITE:]))
    return line if line.text() == value else None


def make_hook_line(current: Path, hook: str, site: str) -> HookLine:
    """Return the line of a hook and the site's own; raise InstallError.

    What cannot be carried over exactly is refused.
    """
    for sign in ',[]"\\':
        if sign in site:
            raise InstallError(
                f"the {hook} in force cannot be kept, its command holds {sign!r}: {site}; put it"
                " into a script, or take it out and run that from your own"
            )
    if site and "=" in str(command_program(site)):
        raise InstallError(f"the {hook} in force cannot be kept, '=' in its path: {site}; move it")
    return HookLine(current, hook, site)


def is_gpulock_command(value: str | None, hook: str) -> bool:
    """Say whether a command line is gpulock's, wherever it is installed."""
    words = (value or "").split()
    starts = len(words) > 1 and words[0].endswith("/prolog/drop-env")
    return starts and words[1].endswith(f"/{hook}/sge")


class QueueHook(Item):
    """One hook of a queue, as a domain of it (a host group, a host) has it."""

    def __init__(self, qconf: Qconf, queue: str, domain: str, line: HookLine) -> None:
        self.qconf, self.queue, self.domain = qconf, queue, f"{queue}@{domain}"
        self.current, self.hook = line.current, line.hook
        self.title = f"{self.hook} of queue {self.domain}"

    def values(self) -> tuple[str, dict[str, str]]:
        """Return the queue's own value and those of domains; raise QconfError."""
        return parse_host_overrides(self.qconf.show("-sq", self.queue)[self.hook])

    def write(self, text: str, domain: str) -> None:
        """Write the hook of a domain; raise QconfError."""
        self.qconf.run("qconf", "-rattr", "queue", self.hook, text, domain)


class GroupHook(QueueHook):
    """A hook of a queue on all hosts of the group."""

    def line(self) -> HookLine:
        """Return our line, around the command that is in force without it; raise InstallError."""
        default = self.values()[0]
        if is_sge_none(default):
            default = self.qconf.shared_configuration().get(self.hook, "")
        return make_hook_line(self.current, self.hook, "" if is_sge_none(default) else default)

    def read(self) -> str | None:
        now = self.values()[1].get(GROUP)
        if now is not None and parse_hook_line(now, self.hook) is None:
            do = f"qconf -purge queue {self.hook} {self.domain}, and run it again"
            raise InstallError(f"{self.title} is {now}, which gpulock does not replace: {do}")
        return now

    def goal(self, wanted: Wanted) -> str | None:
        return self.line().text() if wanted is Wanted.PRESENT else None

    def present(self) -> None:
        self.write(self.line().text(), self.domain)

    def absent(self) -> None:
        self.qconf.run("qconf", "-purge", "queue", self.hook, self.domain)


class HostHook(QueueHook):
    """A hook of a queue in force on this host: the group's, which the host joins."""

    def __init__(self, host: SgeHost, queue: str, hook: str) -> None:
        super().__init__(host.qconf, queue, host.name, HookLine(host.current, hook))
        self.host = host

    def in_force(self) -> str:
        """Return the queue's value on this host."""
        return self.qconf.show("-sq", self.domain)[self.hook]

    def is_ours(self, line: str) -> bool:
        """Say whether a line leads to our hook, the group's as well as one that a person wrote."""
        ours = parse_hook_line(line, self.hook)
        return ours is not None and ours.current == self.current

    def is_member(self) -> bool:
        """Say whether the host is in our group."""
        return self.host.name in self.qconf.hosts_of_group(GROUP)

    def call_to_make(self) -> str:
        """Return the call by which a person gives this host our line, empty where it needs none.

        Over the group's goes a line of the host's own, with another group's it is ambiguous, and it
        is over what the host's configuration names. Raises InstallError.
        """
        default, domains = self.values()
        now, group = self.in_force(), parse_hook_line(domains.get(GROUP), self.hook)
        if group is None or self.is_ours(now):
            return ""
        if now == default and self.host.name not in domains:
            now = (self.host.configuration() or {}).get(self.hook, group.site)
            if not is_sge_none(default) or now == group.site:
                return ""
        is_site = not is_sge_none(now) and not is_gpulock_command(now, self.hook)
        line = make_hook_line(self.current, self.hook, now if is_site else "").text()
        return f"qconf -rattr queue {self.hook} {shlex.quote(line)} {self.domain}"

    def show(self, wanted: Wanted) -> list[str]:
        domains = self.values()[1]
        now, group = self.in_force(), domains.get(GROUP)
        if group is None:
            return []
        is_own = now != group or self.host.name in domains
        joined, is_member = f"{self.host.name} in {GROUP}", self.is_member()
        if wanted is Wanted.ABSENT:
            lines = [] if is_own else difference_lines(group, None)
            return [*lines, *([f"  - {joined}"] if is_member else [])]
        if not parse_hook_line(group, self.hook) or (now != group and self.is_ours(now)):
            return []
        return [*difference_lines(now, group), *([] if is_member else [f"  + {joined}"])]

    def put(self, wanted: Wanted) -> None:
        """Join or leave, and have qmaster look again who is in the group: only then it counts."""
        is_present = wanted is Wanted.PRESENT
        if is_present:
            self.host.await_configuration(sensor=True)
        if self.is_member() is not is_present:
            option = "-aattr" if is_present else "-dattr"
            self.qconf.run("qconf", option, "hostgroup", "hostlist", self.host.name, GROUP)
        line, group = self.values()[1].get(GROUP), f"{self.queue}@{GROUP}"
        if line is not None:
            self.write(line, group)
        elif is_present:
            again = f"gpulock install sge --cluster --queue {self.queue}"
            raise InstallError(f"the {self.hook} of {group} went meanwhile: run {again}")


def site_hooks_left(host: SgeHost) -> Remainder | None:
    """Return the calls that a person makes where it does not do to be in the group."""
    hooks = [HostHook(host, queue, hook) for queue in host.queues() for hook in HOOKS]
    calls = [call for one in hooks if (call := one.call_to_make())]
    what = f"hooks of the site's on {host.name} alone hide gpulock's"
    do = "make the calls that are shown, by which gpulock's run them, and run this again"
    return Remainder(f"{what}: {do}", calls) if calls else None


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
