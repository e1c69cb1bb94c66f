# SPDX-License-Identifier: Apache-2.0
"""The places in Grid Engine's configuration that gpulock changes, each compared and set alone.

One attribute is written at a time. A host's own configuration, and the table of complexes, are
taken whole alone: they are written where our lines are missing, and the global one never is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from gpulock.install.change import Change, Place
from gpulock.install.hooks import InstallError
from gpulock.install.sge.qconf import (
    Qconf,
    QconfError,
    format_qconf_object,
    is_sge_none,
    parse_complexes,
    parse_host_overrides,
    parse_sge_list,
)

_TRIES: Final = 5  # to add complexes beside others who write the table


@dataclass(frozen=True)
class QueueAttribute(Place):
    """An attribute of a queue (`gpu.q`) or of it on one host (`gpu.q@node1`)."""

    qconf: Qconf
    domain: str
    name: str
    kind, named = "queue", "{name} of queue {domain}"
    coordinates = ("domain", "name")

    def read(self) -> str | None:
        """Return the value; None for a host without one of its own."""
        queue, _, host = self.domain.partition("@")
        value = self.qconf.show("-sq", queue)[self.name]
        default, overrides = parse_host_overrides(value)
        return overrides.get(host) if host else default

    def write(self, value: str | None) -> None:
        if value is None:
            self.qconf.run("qconf", "-purge", "queue", self.name, self.domain)
        else:
            self.qconf.run("qconf", "-rattr", "queue", self.name, value, self.domain)


@dataclass(frozen=True)
class HostValue(Place):
    """How much of one complex an execution host has."""

    qconf: Qconf
    host: str
    name: str
    kind, named = "exechost", "complex_values {name} of host {host}"
    coordinates = ("host", "name")

    def read(self) -> str | None:
        return parse_sge_list(self.qconf.show("-se", self.host)["complex_values"]).get(self.name)

    def write(self, value: str | None) -> None:
        """Set this one element: what stands beside it is not ours to write."""
        element = f"{self.name}={value}"
        self.qconf.run("qconf", "-mattr", "exechost", "complex_values", element, self.host)


@dataclass(frozen=True)
class HostConfiguration(Place):
    """A line of a host's own configuration, which goes before the global one."""

    qconf: Qconf
    host: str
    name: str
    kind, named = "configuration", "{name} in the configuration of host {host}"
    coordinates = ("host", "name")

    def read(self) -> str | None:
        return (self.qconf.configuration(self.host) or {}).get(self.name)

    def write(self, value: str | None) -> None:
        """Set the line; the host's other lines stay as they were a moment ago."""
        assert value is not None
        found = self.qconf.configuration(self.host)
        write_host_conf(self.qconf, self.host, found, {**(found or {}), self.name: value})


def write_host_conf(
    qconf: Qconf, host: str, before: Mapping[str, str] | None, lines: Mapping[str, str]
) -> None:
    """Load a host's own configuration, which qconf takes whole; raise QconfError."""
    if qconf.configuration(host) != before:
        raise QconfError(f"the configuration of host {host} was changed meanwhile; run it again")
    qconf.load("-Aconf" if before is None else "-Mconf", host, format_qconf_object(lines))


@dataclass(frozen=True)
class ComplexTable(Place):
    """Lines of the table of complexes that must be there, by name, in the order of `names`."""

    qconf: Qconf
    names: tuple[str, ...]
    kind = "complexes"

    @property
    def title(self) -> str:
        return f"complexes {' '.join(self.names)}"

    def read(self) -> str | None:
        """Return those of the lines that are there."""
        table = read_complexes(self.qconf)
        return "\n".join(table[name] for name in self.names if name in table) or None


@dataclass(frozen=True)
class ComplexChange(Change):
    """Complexes that are missing, in one write: qconf takes the whole table alone.

    It is compared just before, and read back: somebody else may write it at the same time.
    """

    def apply(self) -> None:
        """Add the lines that are missing by now; raise InstallError."""
        assert isinstance(self.place, ComplexTable) and self.after is not None
        qconf, wanted = self.place.qconf, parse_complexes(self.after)
        for _ in range(_TRIES):
            before = read_complexes(qconf)
            if not {*wanted} - {*before}:
                return
            table = {**wanted, **before}
            if read_complexes(qconf) == before:
                qconf.load("-Mc", "complexes", "\n".join(table.values()) + "\n")
        raise QconfError(f"{self.what}: others write the table of complexes; run it again")


def read_complexes(qconf: Qconf) -> dict[str, str]:
    """Return the line of each complex by name; raise QconfError."""
    return parse_complexes(qconf.run("qconf", "-sc"))


def plan_complexes(qconf: Qconf, missing: Mapping[str, str]) -> list[Change]:
    """Return the change that adds complexes, by name, nothing where none is missing; pure."""
    if not missing:
        return []
    place = ComplexTable(qconf, tuple(missing))
    return [ComplexChange(place, None, "\n".join(missing.values()))]


def effective_sge_hook(
    qconf: Qconf, queue: str, host: str, name: str, lines: Mapping[str, str] | None = None
) -> str | None:
    """Return the hook that runs for a queue's jobs on a host: the queue's, the host's, the global.

    exec_job.c of 8.1.9: a queue's value that is not NONE replaces the configuration's, which may
    be given as `lines`.
    """
    value = qconf.show("-sq", f"{queue}@{host}").get(name)
    if is_sge_none(value):
        value = (effective_host_conf(qconf, host) if lines is None else lines).get(name)
    return None if is_sge_none(value) else value


def effective_host_conf(qconf: Qconf, host: str) -> dict[str, str]:
    """Return the configuration that execd of a host goes by: its own lines before the global."""
    return {**(qconf.configuration("global") or {}), **(qconf.configuration(host) or {})}


def queue_instances(qconf: Qconf) -> list[str]:
    """Return every QUEUE@HOST of the cluster."""
    try:
        return [word for word in qconf.run("qselect").split() if "@" in word]
    except QconfError:  # without a word where there is no queue at all
        if qconf.names("-sql"):
            raise
        return []


def check_queues(
    qconf: Qconf, queues: Collection[str], host: str, instances: Collection[str]
) -> None:
    """Raise InstallError for a queue that is not there, or not on a host."""
    there = qconf.names("-sql")
    for queue in queues:
        if queue not in there:
            found = " ".join(there) or "none"
            make = f"make it by qconf -aq {queue}, with {host} in its hostlist, and run it again"
            raise InstallError(f"there is no queue {queue} (there is: {found}): {make}")
        if f"{queue}@{host}" not in instances:
            add = f"add that by qconf -aattr queue hostlist {host} {queue}, and run it again"
            raise InstallError(f"queue {queue} is not on host {host}: {add}")
