# SPDX-License-Identifier: Apache-2.0
"""What execd of a host reports to qmaster, by which it is seen which configuration it has taken.

execd asks for its configuration when the version of a part that it has is another. A host's own
that is new is no such part: execd takes it when it is restarted (docs/facts/grid-engine.md,
configuration changes). The global one would make it, and is not ours to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulock.install.sge.places import effective_host_conf
from gpulock.install.sge.qconf import Qconf, parse_sge_list

REPORTED: Final = ("gpu.free", "gpu.quarantined")
SENSOR: Final = "prolog/sge-sensor"
_DEFAULT_SECONDS: Final = 40  # load_report_time, Grid Engine's default
_PAUSE: Final = 0.5  # seconds between two questions to qmaster
_REPORTS: Final = 3  # one takes the configuration, one starts or stops the sensor, one has values
_NEW_REPORTS: Final = 2
_SLACK_SECONDS: Final = 10.0


@dataclass(frozen=True)
class HostReport:
    """The report of one host, as qmaster has it."""

    qconf: Qconf
    host: str

    def has_sensor_values(self) -> bool:
        """Say whether the report holds values of our sensor."""
        return bool({*REPORTED} & {*parse_sge_list(self.load_values())})

    def load_values(self) -> str:
        """Return all values that execd reported."""
        return self.qconf.show("-se", self.host)["load_values"]

    def delay_seconds(self) -> float:
        """Return in how many seconds execd and qmaster follow a change of configuration."""
        lines = effective_host_conf(self.qconf, self.host)
        return _REPORTS * parse_clock_seconds(lines.get("load_report_time", "")) + _SLACK_SECONDS

    def wait_sensor(self, runs: bool, begun: Callable[[], None]) -> bool:
        """Wait until the sensor reports, or does so no more; return whether that came about.

        The first look costs nothing; `begun` is called before the first pause.
        """
        if self.has_sensor_values() is runs:
            return True
        begun()
        return self.wait_until(lambda: self.has_sensor_values() is runs)

    def wait_new_reports(self, begun: Callable[[], None]) -> bool:
        """Wait for two reports, and so for a changed configuration; return whether they came.

        By the first qmaster sees the old version, and tells execd. No two reports are the same:
        memory and load are in them, with six decimals.
        """
        begun()
        seen = {self.load_values()}

        def came() -> bool:
            seen.add(self.load_values())
            return len(seen) > _NEW_REPORTS

        return self.wait_until(came)

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        """Wait as long as execd may take for a condition; return whether that came about."""
        deadline = time.monotonic() + self.delay_seconds()
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


def parse_clock_seconds(text: str) -> int:
    """Return `00:00:40` in seconds, 40 (Grid Engine's default) for anything else."""
    try:
        hours, minutes, seconds = map(int, text.split(":"))
    except ValueError:
        return _DEFAULT_SECONDS
    return hours * 3600 + minutes * 60 + seconds
