# SPDX-License-Identifier: Apache-2.0
"""What Grid Engine has of one host: its amounts and its own configuration; the files it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Optional

from gpulock.install.items import Item, Remainder, Wanted, difference_lines
from gpulock.install.sge.host_report import SENSOR, HostReport
from gpulock.install.sge.qconf import (
    Qconf,
    QconfError,
    format_qconf_object,
    is_sge_none,
    parse_sge_list,
)
from gpulock.install.sge.qmaster import effective_host_conf
from gpulock.install.sge.texts import (
    SHEPHERD,
)
from gpulock.install.versions import Hooks

CONF_LINES: Final = ("load_sensor", "shepherd_cmd")
Conf = Optional[dict[str, str]]


@dataclass(frozen=True)
class SgeHost:
    """One execution host: its name, the way to qmaster, its hooks, and what its execd reports."""

    qconf: Qconf
    name: str
    current: Path
    report: HostReport

    def configuration(self) -> Conf:
        """Return the host's own configuration, None where it has none."""
        return self.qconf.configuration(self.name)

    def shared(self) -> dict[str, str]:
        """Return the global configuration."""
        return self.qconf.configuration("global") or {}

    def is_ours(self, value: str | None) -> bool:
        """Say whether a value names a program below our folder."""
        return f"{self.current}/" in (value or "")

    def without_ours(self, value: str) -> str:
        """Return a list of programs without ours, `none` where nothing is left."""
        words = [word.strip() for word in value.split(",")]
        return ",".join(word for word in words if not self.is_ours(word)) or "none"


class Amount(Item):
    """How much of one complex the host has; it stays, for the site's jobs count it."""

    def __init__(self, host: SgeHost, name: str, amount: int, needs: tuple[Item, ...]) -> None:
        self.host, self.name, self.needs = host, name, needs
        self.element = f"{name}={amount}"
        self.title = f"complex_values of host {host.name}"

    def show(self, wanted: Wanted) -> list[str]:
        now = read_amounts(self.host).get(self.name)
        before = None if now is None else f"{self.name}={now}"
        return [] if wanted is Wanted.ABSENT else difference_lines(before, self.element)

    def present(self) -> None:
        words = ("exechost", "complex_values", self.element, self.host.name)
        self.host.qconf.run("qconf", "-mattr", *words)


class HostConfiguration(Item):
    """Load sensor and shepherd_cmd in the host's own configuration, which qconf takes whole."""

    def __init__(self, host: SgeHost, needs: tuple[Item, ...]) -> None:
        self.host, self.needs = host, needs
        self.title = f"configuration of host {host.name}"

    def show(self, wanted: Wanted) -> list[str]:
        now = self.host.configuration()
        after = self.wanted(wanted, now)
        return [] if now == after else difference_lines(*map(_format, (now, after)))

    def wanted(self, wanted: Wanted, now: Conf) -> Conf:
        """Return what the configuration is to be: both lines with our programs, or without."""
        if wanted is Wanted.ABSENT:
            return self._without(now)
        lines = {**self.host.shared(), **(now or {})}
        sensor, found = f"{self.host.current}/{SENSOR}", lines.get("load_sensor", "none")
        others = [] if is_sge_none(found) else [word.strip() for word in found.split(",")]
        if sensor not in others:
            others = [*(word for word in others if not word.endswith(f"/{SENSOR}")), sensor]
        own = {**(now or {}), "load_sensor": ",".join(others)}
        if not self._site_shepherd(lines):
            own["shepherd_cmd"] = f"{self.host.current}/{SHEPHERD}"
        return own

    def _without(self, now: Conf) -> Conf:
        """Take our programs out; one that would be empty changes nothing, for execd to take it."""
        shared, own = self.host.shared(), dict(now or {})
        for name in CONF_LINES:
            if self.host.is_ours(own.get(name)):
                rest = self.host.without_ours(own.pop(name))
                if rest != _or_none(shared.get(name)):
                    own[name] = rest
        return None if now is None else own or idle_configuration(shared)

    def _site_shepherd(self, lines: Mapping[str, str]) -> str:
        """Return the shepherd_cmd of the site's, which stays."""
        found = lines.get("shepherd_cmd", "none")
        return "" if is_sge_none(found) or found.endswith(f"/{SHEPHERD}") else found

    def present(self) -> None:
        self._write(Wanted.PRESENT)

    def absent(self) -> None:
        self._write(Wanted.ABSENT)

    def _write(self, wanted: Wanted) -> None:
        host, before = self.host, self.host.configuration()
        after = self.wanted(wanted, before)
        if host.configuration() != before:
            raise QconfError("it was changed meanwhile; run it again")
        host.qconf.load("-Aconf" if before is None else "-Mconf", host.name, _format(after) or "")
        host.report.is_first = before is None

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return None
        if site := self._site_shepherd(effective_host_conf(self.host.qconf, self.host.name)):
            return Remainder(
                f"shepherd_cmd stays {site}, so a job's text can name a prolog of its own: set"
                f" SGE_SHEPHERD={site}, then shepherd_cmd none, and run this again"
            )
        if self.host.report.is_first and self.host.report.execd:
            return Remainder(
                f"execd of {self.host.name} takes its first configuration when it starts: restart"
                " it (its jobs run on), and run this again"
            )
        return None


class SgeHooks(Hooks):
    """The rendered hooks, which stay until execd starts neither sensor nor shepherd of ours."""

    report: HostReport | None = None

    def absent(self) -> None:
        if self.report:
            self.report.await_configuration(sensor=False)
        super().absent()


def read_amounts(host: SgeHost) -> dict[str, str]:
    """Return how much of each complex a host has; raise QconfError."""
    return parse_sge_list(host.qconf.show("-se", host.name)["complex_values"])


def idle_configuration(shared: Mapping[str, str]) -> dict[str, str]:
    """Return a configuration of a host that changes nothing."""
    return {"load_sensor": _or_none(shared.get("load_sensor"))}


def _or_none(value: str | None) -> str:
    """Return a value of a configuration as Grid Engine goes by it."""
    return "none" if value is None or is_sge_none(value) else value


def _format(conf: Conf) -> str | None:
    return format_qconf_object(conf) if conf else None
