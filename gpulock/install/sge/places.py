# SPDX-License-Identifier: Apache-2.0
"""The places in Grid Engine's configuration that gpulock changes, each compared and set alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpulock.install.change import Place
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
from gpulock.install.sge.texts import HOOKS


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
        """Set or take away this one element: what stands beside it is not ours to write."""
        option, element = (
            ("-dattr", self.name) if value is None else ("-mattr", f"{self.name}={value}")
        )
        self.qconf.run("qconf", option, "exechost", "complex_values", element, self.host)


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
        """Set the line or take it away; a configuration without lines is none."""
        found = self.qconf.configuration(self.host)
        lines = dict(found or {})
        if value is None:
            lines.pop(self.name, None)
        else:
            lines[self.name] = value
        if lines:
            self.qconf.load(
                "-Aconf" if found is None else "-Mconf", self.host, format_qconf_object(lines)
            )
        elif found is not None:
            self.qconf.run("qconf", "-dconf", self.host)


@dataclass(frozen=True)
class Complex(Place):
    """One line of the complex table.

    `patience` is how long to wait until qmaster has forgotten what a load sensor reported.
    """

    qconf: Qconf
    name: str
    patience: float = 0.0
    kind, named = "complex", "complex {name}"
    coordinates = ("name",)

    def read(self) -> str | None:
        return parse_complexes(self.qconf.run("qconf", "-sc")).get(self.name)

    def write(self, value: str | None) -> None:
        """Set the line; qconf takes the whole table, read a moment ago."""
        deadline = time.monotonic() + self.patience
        while True:
            lines = parse_complexes(self.qconf.run("qconf", "-sc"))
            if value is None:
                lines.pop(self.name, None)
            else:
                lines[self.name] = value
            try:
                return self.qconf.load("-Mc", "complexes", "\n".join(lines.values()) + "\n")
            except QconfError as fault:
                if "still referenced" not in str(fault) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


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


def find_hook_references(qconf: Qconf, host: str, prefix: str, is_master: bool) -> list[str]:
    """Return what on a host still names a path below `prefix`; qmaster starts the verifier."""
    lines = effective_host_conf(qconf, host)
    names = ("load_sensor", "shepherd_cmd", *(("jsv_url",) if is_master else ()))
    found = [
        f"{hook} of {instance}"
        for instance in queue_instances(qconf)
        if instance.endswith(f"@{host}")
        for hook in HOOKS
        if f"{prefix}/"
        in (effective_sge_hook(qconf, instance.partition("@")[0], host, hook, lines) or "")
    ]
    return found + [
        f"{name} of host {host}" for name in names if f"{prefix}/" in lines.get(name, "")
    ]
