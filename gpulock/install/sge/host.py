# SPDX-License-Identifier: Apache-2.0
"""One execution host as qmaster has it: what it counts, which configuration its execd has taken.

execd asks for its configuration when the version of a part that it has is another. A host's own
that is new is no such part: execd takes it when it is restarted (docs/facts/grid-engine.md,
configuration changes). The global one would make it, and is not ours to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Optional

from gpulock.errors import Refusal
from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.files import InstallError
from gpulock.install.sge.qconf import Qconf, parse_sge_list
from gpulock.node.context import Node
from gpulock.node.kinds import SHARE_KIND
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card
from gpulock.sge.sensor import complex_devices

Conf = Optional[dict[str, str]]
REPORTED: Final = ("gpu.free", "gpu.quarantined")  # by the load sensor
# complex(5) from the type on: type relop requestable consumable default urgency
_COUNTED: Final = "INT <= YES YES 0 0"
_REPORTED: Final = "INT <= YES NO 0 0"
_DEFAULT_SECONDS: Final = 40  # load_report_time, Grid Engine's default
_PAUSE: Final = 0.5  # seconds between two questions to qmaster
_REPORTS: Final = 3  # one takes the configuration, one starts or stops the sensor, one has values
_NEW_REPORTS: Final = 2
_SLACK_SECONDS: Final = 10.0


class SgeHost:
    """A host: its name, the way to qmaster, its hooks; `execd` is none where it does not run."""

    def __init__(
        self,
        qconf: Qconf,
        name: str,
        current: Path,
        execd: SchedulerDaemon | None,
        echo: Callable[[str], None],
    ) -> None:
        self.qconf, self.name, self.current = qconf, name, current
        self.execd, self.echo = execd, echo
        self.is_first = False  # the host's configuration was made in this run
        self._followed = execd is None

    def configuration(self) -> Conf:
        """Return the host's own configuration, None where it has none."""
        return self.qconf.configuration(self.name)

    def effective_configuration(self) -> dict[str, str]:
        """Return what execd goes by: the host's own lines before the global ones."""
        return {**self.qconf.shared_configuration(), **(self.configuration() or {})}

    def queues(self) -> list[str]:
        """Return the queues that the host has."""
        return self.qconf.queues_of_host(self.name)

    def values(self, kind: str) -> dict[str, str]:
        """Return the `complex_values` of the host, or the `load_values` that execd reported."""
        return parse_sge_list(self.qconf.show("-se", self.name)[kind])

    def is_ours(self, value: str | None) -> bool:
        """Say whether a value names a program below our folder."""
        return f"{self.current}/" in (value or "")

    def await_configuration(self, sensor: bool) -> None:
        """Wait until execd goes by a configuration with our sensor, or without; raise InstallError.

        That is once two later reports have come, and the last has values of our sensor, or none. By
        the first report qmaster sees the old version, and tells execd. No two reports are the same:
        memory and load are in them, with six decimals.
        """
        if self._followed:
            return
        self.echo(f"waiting for execd of {self.name} to take its configuration")
        interval = self.effective_configuration().get("load_report_time", "")
        delay = _REPORTS * parse_clock_seconds(interval) + _SLACK_SECONDS
        deadline, reports = time.monotonic() + delay, list[dict[str, str]]()
        while True:
            values = self.values("load_values")
            reports += [values] if values not in reports else []
            reported = not {*REPORTED}.isdisjoint(values)
            if len(reports) > _NEW_REPORTS and reported is sensor:
                self._followed = True
                return
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        what = "sends no new report"
        if reported is not sensor:
            what = "still runs the load sensor" if reported else "starts no load sensor"
        raise InstallError(
            f"execd of {self.name} {what} after {delay:.0f} s: restart execd, which then takes a"
            f" new configuration; its jobs run on, or see"
            f" {self.execd.folder if self.execd else ''}/messages, then run it again"
        )


def parse_clock_seconds(text: str) -> int:
    """Return `00:00:40` in seconds, 40 (Grid Engine's default) for anything else."""
    try:
        hours, minutes, seconds = map(int, text.split(":"))
    except ValueError:
        return _DEFAULT_SECONDS
    return hours * 3600 + minutes * 60 + seconds


def counting_complexes(settings: Settings) -> list[str]:
    """Return the complexes by which jobs ask for GPUs: the plain one, and those of kinds."""
    kinds = [name for name, kind in settings.sge_kinds.items() if kind]
    return [*dict.fromkeys([settings.sge_complexes[0], *kinds])]


def cluster_complexes(settings: Settings) -> dict[str, str]:
    """Return the line of each complex that jobs and the load sensor need."""
    lines = {name: f"{name} {name} {_COUNTED}" for name in counting_complexes(settings)}
    return lines | {name: f"{name} {name} {_REPORTED}" for name in REPORTED}


def host_amount(settings: Settings, name: str, gpus: int) -> int:
    """Return how many GPUs of this node a complex counts.

    The plain one counts `gpus`, on a node with MIG those of its kind.
    """
    try:
        found = Node(settings).devices()
    except Refusal:  # no driver is loaded
        found = []
    if settings.sge_kinds.get(name) or any(device.parent for device in found):
        if settings.sge_kinds.get(name) == SHARE_KIND:
            return sum(count_places_by_card(found, settings.shares).values())
        return len(complex_devices(found, settings, name))
    return gpus


def check_complexes(table: Mapping[str, str], lines: Mapping[str, str]) -> None:
    """Raise InstallError for a complex that is there and cannot count GPUs; pure."""
    for name in lines:
        if name in table and name not in REPORTED and (fault := complex_fault(table[name])):
            raise InstallError(f"complex {name}: {fault}; correct it by qconf -mc")


def complex_fault(line: str) -> str:
    """Return why a complex cannot stand for GPUs, or nothing; pure."""
    _, _, kind, relop, requestable, consumable, default, _ = line.split()
    if kind not in ("INT", "RSMAP"):
        return f"its type is {kind}, it must be INT or RSMAP"
    if relop != "<=":
        return f"its relation is {relop}, it must be <="
    if consumable not in ("YES", "JOB", "HOST"):
        return f"consumable is {consumable}, it must be YES (per slot), JOB or HOST"
    if default not in ("0", "NONE"):
        return f"its default is {default}, which no hook can see; it must be 0"
    if requestable not in ("YES", "FORCED"):
        return "no job can request it"
    return ""
