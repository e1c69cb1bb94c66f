# SPDX-License-Identifier: Apache-2.0
"""What Grid Engine has of one host: its amounts, its own configuration, lines that lead to us."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.sge.host import Conf, SgeHost
from gpulock.install.sge.qconf import format_qconf_object, is_sge_none, parse_host_overrides
from gpulock.install.sge.queue_hooks import GROUP, HOOKS, hooked_queues

CLUSTER: Final = "gpulock install sge --cluster --queue QUEUE"
_SENSOR: Final = "prolog/sge-sensor"
_SHEPHERD: Final = "prolog/sge_shepherd"
_OWN_LINES: Final = ("load_sensor", "shepherd_cmd")


def missing_in_cluster(host: SgeHost, complexes: Collection[str]) -> Remainder | None:
    """Return what a manager has not installed: without it no job comes to the hooks."""
    table = host.qconf.complexes()
    missing = [name for name in complexes if name not in table]
    what = [f"there is no complex {' '.join(missing)}"] if missing else []
    lines = hooked_queues(host)
    if not lines:
        what.append(f"no queue of {host.name} has hooks for {GROUP}")
    elif wrong := [one for one in lines.items() if one[1] != host.current]:
        queue, current = wrong[0]
        what.append(f"{queue} leads to {current}, not to {host.current}")
    return Remainder("; ".join(what), [f"once, by a manager: {CLUSTER}"]) if what else None


class Amount(Item):
    """How much of one complex the host has; it stays, for the site's jobs count it."""

    def __init__(self, host: SgeHost, name: str, amount: int) -> None:
        self.host, self.name = host, name
        self.element = f"{name}={amount}"
        self.title = f"complex_values of host {host.name}"

    def read(self) -> str | None:
        now = self.host.values("complex_values").get(self.name)
        return None if now is None else f"{self.name}={now}"

    def goal(self, wanted: Wanted) -> str | None:
        return self.element if wanted is Wanted.PRESENT else self.read()

    def present(self) -> None:
        words = ("exechost", "complex_values", self.element, self.host.name)
        self.host.qconf.run("qconf", "-mattr", *words)


class HostConfiguration(Item):
    """Load sensor and shepherd_cmd in the host's own configuration, which qconf takes whole."""

    def __init__(self, host: SgeHost) -> None:
        self.host = host
        self.title = f"configuration of host {host.name}"

    def read(self) -> str | None:
        return _format(self.host.configuration())

    def goal(self, wanted: Wanted) -> str | None:
        shared = self.host.qconf.shared_configuration()
        return _format(self.wanted(wanted, shared, self.host.configuration()))

    def wanted(self, wanted: Wanted, shared: Mapping[str, str], now: Conf) -> Conf:
        """Return what the configuration is to be: both lines with our programs, or without.

        One that would be empty says what the global one says, for execd to take it.
        """
        own = dict(now or {})
        lines = {**shared, **own}
        if wanted is Wanted.PRESENT:
            sensor, found = f"{self.host.current}/{_SENSOR}", _words(lines.get("load_sensor"))
            if sensor not in found:  # of another installation of gpulock's one goes
                found = [*(one for one in found if not one.endswith(f"/{_SENSOR}")), sensor]
            own["load_sensor"] = ",".join(found)
            if not site_shepherd(lines):
                own["shepherd_cmd"] = f"{self.host.current}/{_SHEPHERD}"
            return own
        for name in _OWN_LINES:
            if self.host.is_ours(own.get(name)):
                words = [word for word in _words(own.pop(name)) if not self.host.is_ours(word)]
                if words != _words(shared.get(name)):
                    own[name] = ",".join(words) or "none"
        return None if now is None else own or idle_configuration(shared)

    def put(self, wanted: Wanted) -> None:
        """Write what is there at this moment, with our lines or without."""
        host, shared = self.host, self.host.qconf.shared_configuration()
        before = host.configuration()
        text = _format(self.wanted(wanted, shared, before)) or ""
        host.qconf.load("-Aconf" if before is None else "-Mconf", host.name, text)
        host.is_first = before is None

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return None
        if site := site_shepherd(self.host.effective_configuration()):
            return Remainder(
                f"shepherd_cmd stays {site}, so a job's text can name a prolog of its own: set"
                f" SGE_SHEPHERD={site}, then shepherd_cmd none, and run this again"
            )
        if self.host.is_first and self.host.execd:
            return Remainder(
                f"execd of {self.host.name} takes its first configuration when it starts: restart"
                " it (its jobs run on), and run this again"
            )
        return None


def site_lines_left(host: SgeHost, is_master: bool) -> Remainder | None:
    """Return the lines that the site wrote itself, and that lead to gpulock's files."""
    lines = [*_site_lines(host, is_master)]
    what = "lines of the site's lead to gpulock: take out what is named above, and run it again"
    return Remainder(what, lines) if lines else None


def _site_lines(host: SgeHost, is_master: bool) -> Iterator[str]:
    """Yield what leads here, but for the items' own; jsv_url leads to qmaster's own files."""
    for queue in host.queues():
        shown = host.qconf.show("-sq", queue)
        domains = [parse_host_overrides(shown[hook])[1] for hook in HOOKS]
        ours = [one.get(GROUP) for one in domains if host.name not in one]
        for key, value in host.qconf.show("-sq", f"{queue}@{host.name}").items():
            if host.is_ours(value) and value not in ours:
                yield f"qconf -mq {queue}: {key} of {queue}@{host.name} is {value}"
    own = host.configuration() or {}
    for key, value in host.effective_configuration().items():
        is_item = key in own and key in _OWN_LINES
        if host.is_ours(value) and not is_item and (key != "jsv_url" or is_master):
            yield f"qconf -mconf{f' {host.name}' if key in own else ''}: {key} is {value}"


def site_shepherd(lines: Mapping[str, str]) -> str:
    """Return the shepherd_cmd of the site's, which stays; nothing where there is none."""
    found = lines.get("shepherd_cmd", "none")
    return "" if is_sge_none(found) or found.endswith(f"/{_SHEPHERD}") else found


def idle_configuration(shared: Mapping[str, str]) -> dict[str, str]:
    """Return a configuration of a host that changes nothing."""
    return {"load_sensor": ",".join(_words(shared.get("load_sensor"))) or "none"}


def _words(value: str | None) -> list[str]:
    """Return the programs of a list, none for `none`."""
    return [] if value is None or is_sge_none(value) else [one.strip() for one in value.split(",")]


def _format(conf: Conf) -> str | None:
    return format_qconf_object(conf) if conf else None
