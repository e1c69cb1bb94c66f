# SPDX-License-Identifier: Apache-2.0
"""One execution host as qmaster has it: its values, its own configuration, what execd has taken.

execd asks for its configuration when the version of a part that it has is another. A host's own
that is new is no such part: execd takes it when it is restarted (docs/facts/grid-engine.md,
configuration changes). The global one would make it, and is not ours to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.files import InstallError
from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.sge.qconf import Qconf, format_qconf_object, parse_sge_list, sge_value

REPORTED: Final = ("gpu.free", "gpu.quarantined")  # by the load sensor
_SENSOR: Final = "prolog/sge-sensor"
_SHEPHERD: Final = "prolog/sge_shepherd"
OWN_LINES: Final = ("load_sensor", "shepherd_cmd")
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
        self._followed = execd is None

    def configuration(self) -> dict[str, str] | None:
        """Return the host's own configuration, None where it has none."""
        known = self.name in self.qconf.names("-sconfl")
        return self.qconf.show("-sconf", self.name) if known else None

    def effective_configuration(self) -> dict[str, str]:
        """Return what execd goes by: the host's own lines before the global ones."""
        return {**self.qconf.shared_configuration(), **(self.configuration() or {})}

    def queues(self) -> list[str]:
        """Return the queues that the host has."""
        if not self.qconf.names("-sql"):
            return []  # qselect fails without a word then
        instances = [one.split("@") for one in self.qconf.run("qselect").split() if "@" in one]
        return [queue for queue, name in instances if name == self.name]

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
        while time.monotonic() <= deadline or not reports:
            values = self.values("load_values")
            reports += [values] if values not in reports else []
            if len(reports) > _NEW_REPORTS and {*REPORTED}.isdisjoint(values) is not sensor:
                self._followed = True
                return
            time.sleep(_PAUSE)
        raise InstallError(
            f"execd of {self.name} does not go by its configuration after {delay:.0f} s: restart"
            " execd, which then takes a new one; its jobs run on, or see its messages file, then"
            " run it again"
        )


def parse_clock_seconds(text: str) -> int:
    """Return `00:00:40` in seconds, 40 (Grid Engine's default) for anything else."""
    try:
        hours, minutes, seconds = map(int, text.split(":"))
    except ValueError:
        return _DEFAULT_SECONDS
    return hours * 3600 + minutes * 60 + seconds


class HostConfiguration(Item):
    """Load sensor and shepherd_cmd in the host's own configuration, which qconf takes whole."""

    def __init__(self, host: SgeHost) -> None:
        self.host = host
        self.title = f"configuration of host {host.name}"
        self.is_first = False  # it was made in this run

    def read(self) -> str | None:
        now = self.host.configuration()
        return format_qconf_object(now) if now else None

    def goal(self, wanted: Wanted) -> str | None:
        """Return what it is to be: both lines with our programs, or without.

        One that would be empty says what the global one says, for execd to take it.
        """
        shared, now = self.host.qconf.shared_configuration(), self.host.configuration()
        own = dict(now or {})
        lines = {**shared, **own}
        if wanted is Wanted.PRESENT:
            sensors = [
                one for one in _programs(lines, "load_sensor") if not one.endswith(f"/{_SENSOR}")
            ]  # without one of another installation of gpulock's
            own["load_sensor"] = ",".join([*sensors, f"{self.host.current}/{_SENSOR}"])
            if not site_shepherd(lines):
                own["shepherd_cmd"] = f"{self.host.current}/{_SHEPHERD}"
        elif now is None:
            return None
        for name in OWN_LINES if wanted is Wanted.ABSENT else ():
            if self.host.is_ours(own.get(name)):
                words = [word for word in _programs(own, name) if not self.host.is_ours(word)]
                del own[name]
                if words != _programs(shared, name):
                    own[name] = ",".join(words) or "none"
        return format_qconf_object(own) if own else self.idle_text()

    def idle_text(self) -> str:
        """Return a configuration of a host that changes nothing."""
        sensors = _programs(self.host.qconf.shared_configuration(), "load_sensor")
        return format_qconf_object({"load_sensor": ",".join(sensors) or "none"})

    def write(self, wanted: Wanted) -> None:
        """Write what is there at this moment, with our lines or without."""
        self.is_first = self.host.configuration() is None
        option = "-Aconf" if self.is_first else "-Mconf"
        self.host.qconf.load(option, self.host.name, self.goal(wanted) or "")

    def remainder(self, wanted: Wanted) -> Remainder | None:
        if wanted is Wanted.ABSENT:
            return None
        if site := site_shepherd(self.host.effective_configuration()):
            return Remainder(
                f"shepherd_cmd stays {site}, so a job's text can name a prolog of its own: set"
                f" SGE_SHEPHERD={site}, then shepherd_cmd none, and run this again"
            )
        if self.is_first and self.host.execd:
            return Remainder(
                f"execd of {self.host.name} takes its first configuration when it starts: restart"
                " it (its jobs run on), and run this again"
            )
        return None


def site_shepherd(lines: Mapping[str, str]) -> str:
    """Return the shepherd_cmd of the site's, which stays; nothing where there is none."""
    command = sge_value(lines.get("shepherd_cmd"))
    return "" if command.endswith(f"/{_SHEPHERD}") else command


def _programs(lines: Mapping[str, str], name: str) -> list[str]:
    """Return the programs of a list, none for `none`."""
    return [one.strip() for one in sge_value(lines.get(name)).split(",") if one.strip()]
