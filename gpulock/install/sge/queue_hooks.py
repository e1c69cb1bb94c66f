# SPDX-License-Identifier: Apache-2.0
"""Prolog and epilog of a queue: for all hosts of the group, and in force on one host.

The site's command stands in our line as it stood in its own, so Grid Engine goes on splitting it
and filling in its $variables; our hook runs it with its own user and environment.
`prolog/drop-env` stands first: whatever the job's environment holds, it starts.

A host that joins or leaves a host group has the group's hook, or none, once that very attribute of
the queue is written again (docs/facts/grid-engine.md, configuration changes).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.sge.host import OWN_LINES, SgeHost
from gpulock.install.sge.qconf import Qconf, sge_value

GROUP: Final = "@gpulock"
HOOKS: Final = ("epilog", "prolog")  # as they are set: no job may claim before there is an epilog
_SITE: Final = 6  # words before the site's: drop-env, our hook, those three, $job_owner


def hook_line(current: Path, hook: str, site: str = "") -> str:
    """Return the line of one of our hooks, which runs the site's own command as well; pure."""
    behind = f" $job_owner {site}" if site else ""
    ours = f"{current}/prolog/drop-env {current}/{hook}/sge"
    return f"root@{ours} $job_id $ja_task_id $queue{behind}"


def is_hook_line(current: Path, hook: str, value: str) -> bool:
    """Say whether a line is ours, and not edited by the site; pure."""
    return value == hook_line(current, hook, site_command(value))


def site_command(value: str) -> str:
    """Return the site's own command in a line of ours; pure."""
    return " ".join(value.split()[_SITE:])


def join_hooks(current: Path, hook: str, site: str) -> str:
    """Return our line with the site's command; raise InstallError.

    What cannot be carried over exactly is refused.
    """
    for sign in ',[]"\\':
        if sign in site:
            raise InstallError(
                f"the {hook} in force cannot be kept, its command holds {sign!r}: {site}; put it"
                " into a script, or take it out and run that from your own"
            )
    if site and "=" in site.split(maxsplit=1)[0]:
        raise InstallError(f"the {hook} in force cannot be kept, '=' in its path: {site}; move it")
    return hook_line(current, hook, site)


class GroupHook(Item):
    """A hook of a queue on all hosts of the group."""

    def __init__(self, qconf: Qconf, current: Path, queue: str, hook: str) -> None:
        self.qconf, self.current, self.queue, self.hook = qconf, current, queue, hook
        self.domain = f"{queue}@{GROUP}"
        self.title = f"{hook} of queue {self.domain}"

    def site_command(self) -> str:
        """Return the command that is in force without our line, empty for none."""
        own = sge_value(self.qconf.hook_values(self.queue, self.hook)[0])
        return own or sge_value(self.qconf.shared_configuration().get(self.hook))

    def read(self) -> str | None:
        now = self.qconf.hook_values(self.queue, self.hook)[1].get(GROUP)
        if now is not None and not is_hook_line(self.current, self.hook, now):
            do = f"qconf -purge queue {self.hook} {self.domain}, and run it again"
            raise InstallError(f"{self.title} is {now}, which gpulock does not replace: {do}")
        return now

    def goal(self, wanted: Wanted) -> str | None:
        is_present = wanted is Wanted.PRESENT
        return join_hooks(self.current, self.hook, self.site_command()) if is_present else None

    def write(self, wanted: Wanted) -> None:
        if line := self.goal(wanted):
            self.qconf.run("qconf", "-rattr", "queue", self.hook, line, self.domain)
        else:
            self.qconf.run("qconf", "-purge", "queue", self.hook, self.domain)


class HostHook(Item):
    """A hook of a queue in force on this host: the group's, which the host joins."""

    def __init__(self, host: SgeHost, queue: str, hook: str) -> None:
        self.host, self.queue, self.hook = host, queue, hook
        self.domain = f"{queue}@{host.name}"
        self.title = f"{hook} of queue {self.domain}"
        self.joined = f"{host.name} in {GROUP}"

    def values(self) -> tuple[str, dict[str, str]]:
        """Return the queue's own value, and those of domains; raise InstallError."""
        return self.host.qconf.hook_values(self.queue, self.hook)

    def in_force(self) -> str:
        """Return the queue's value on this host."""
        return self.host.qconf.show("-sq", self.domain)[self.hook]

    def is_member(self) -> bool:
        """Say whether the host is in our group."""
        return self.host.name in self.host.qconf.hosts_of_group(GROUP)

    def check(self) -> None:
        """Raise InstallError for a hook of this host alone.

        Over the group's goes a line of the host's own, with another group's it is ambiguous, and it
        is over what the host's configuration names.
        """
        default, domains = self.values()
        now, call = self.in_force(), f"qconf -mq {self.queue}"
        if own := (self.host.configuration() or {}).get(self.hook):
            now, call = own, f"qconf -mconf {self.host.name}"
        elif self.host.name not in domains and now in (default, domains.get(GROUP)):
            return
        raise InstallError(
            f"{self.host.name} alone has the {self.hook} {now}: take it out ({call}). If it is to"
            f" run beside gpulock's, give it to all of {self.queue}, and run gpulock install sge"
            f" --cluster --queue {self.queue} again"
        )

    def read(self) -> str | None:
        """Return the hook in force, and whether the host is a member; None where there is none."""
        if GROUP not in self.values()[1]:
            return None
        return "\n".join([self.in_force(), *([self.joined] if self.is_member() else [])])

    def goal(self, wanted: Wanted) -> str | None:
        domains, now = self.values()[1], self.in_force()
        if (group := domains.get(GROUP)) is None:
            return None
        if wanted is Wanted.ABSENT:
            is_own = now != group or self.host.name in domains
            return now if is_own else None
        return f"{group}\n{self.joined}"

    def write(self, wanted: Wanted) -> None:
        """Join or leave, and have qmaster look again who is in the group: only then it counts."""
        is_present, qconf = wanted is Wanted.PRESENT, self.host.qconf
        if is_present:
            self.host.await_configuration(sensor=True)
        if self.is_member() is not is_present:
            option = "-aattr" if is_present else "-dattr"
            qconf.run("qconf", option, "hostgroup", "hostlist", self.host.name, GROUP)
        if line := self.values()[1].get(GROUP):
            qconf.run("qconf", "-rattr", "queue", self.hook, line, f"{self.queue}@{GROUP}")
        elif is_present:
            again = f"gpulock install sge --cluster --queue {self.queue}"
            raise InstallError(
                f"the {self.hook} of {self.queue}@{GROUP} went meanwhile: run {again}"
            )


def queue_hooks(host: SgeHost, *hooks: str) -> list[HostHook]:
    """Return some hooks of all queues of a host."""
    return [HostHook(host, queue, hook) for hook in hooks for queue in host.queues()]


def hooked_queues(host: SgeHost) -> list[str]:
    """Return the queues of this host that have its hooks for the group."""

    def is_hooked(queue: str, hook: str) -> bool:
        value = host.qconf.hook_values(queue, hook)[1].get(GROUP, "")
        return is_hook_line(host.current, hook, value)

    return [queue for queue in host.queues() if all(is_hooked(queue, hook) for hook in HOOKS)]


def site_lines_left(host: SgeHost) -> Remainder | None:
    """Return the lines that the site wrote itself, and that lead to gpulock's files."""
    lines: list[str] = []
    for queue in host.queues():
        domains = [host.qconf.hook_values(queue, hook)[1] for hook in HOOKS]
        ours = [one.get(GROUP) for one in domains if host.name not in one]
        for key, value in host.qconf.show("-sq", f"{queue}@{host.name}").items():
            if host.is_ours(value) and value not in ours:
                lines.append(f"qconf -mq {queue}: {key} of {queue}@{host.name} is {value}")
    own = {
        key: value for key, value in (host.configuration() or {}).items() if key not in OWN_LINES
    }
    for call, pairs in ((f" {host.name}", own), ("", host.qconf.shared_configuration())):
        here = [(key, value) for key, value in pairs.items() if host.is_ours(value)]
        lines += [f"qconf -mconf{call}: {key} is {value}" for key, value in here]
    what = "lines of the site's lead to gpulock: take out what is named above, and run it again"
    return Remainder(what, lines) if lines else None
