# SPDX-License-Identifier: Apache-2.0
"""What execd of a host reports to qmaster, by which it is seen which configuration it has taken.

execd asks for its configuration when the version of a part that it has is another. A host's own
that is new is no such part: execd takes it when it is restarted (docs/facts/grid-engine.md,
configuration changes). The global one would make it, and is not ours to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.files import InstallError
from gpulock.install.sge.qconf import Qconf, parse_sge_list
from gpulock.install.sge.qmaster import effective_host_conf

REPORTED: Final = ("gpu.free", "gpu.quarantined")
SENSOR: Final = "prolog/sge-sensor"
RESTART: Final = "restart execd, which then takes a new configuration; its jobs run on"
_DEFAULT_SECONDS: Final = 40  # load_report_time, Grid Engine's default
_PAUSE: Final = 0.5  # seconds between two questions to qmaster
_REPORTS: Final = 3  # one takes the configuration, one starts or stops the sensor, one has values
_NEW_REPORTS: Final = 2
_SLACK_SECONDS: Final = 10.0


class HostReport:
    """The report of one host, as qmaster has it; `execd` is none where it does not run here."""

    def __init__(
        self, qconf: Qconf, host: str, execd: SchedulerDaemon | None, echo: Callable[[str], None]
    ) -> None:
        self.qconf, self.host, self.execd, self.echo = qconf, host, execd, echo
        self.is_first = False  # the host's configuration was made in this run
        self._followed = execd is None

    def load_values(self) -> str:
        """Return all values that execd reported."""
        return self.qconf.show("-se", self.host)["load_values"]

    def await_configuration(self, sensor: bool) -> None:
        """Wait until execd goes by a configuration with our sensor, or without; raise InstallError.

        That is once two later reports have come, and the last has values of our sensor, or none. By
        the first report qmaster sees the old version, and tells execd. No two reports are the same:
        memory and load are in them, with six decimals.
        """
        if self._followed:
            return
        self.echo(f"waiting for execd of {self.host} to take its configuration")
        reports: set[str] = set()
        deadline = time.monotonic() + self._delay_seconds()
        while True:
            reports.add(values := self.load_values())
            reported = bool({*REPORTED} & {*parse_sge_list(values)})
            if len(reports) > _NEW_REPORTS and reported is sensor:
                self._followed = True
                return
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        what = "still runs the load sensor" if reported else "starts no load sensor"
        raise InstallError(
            f"execd of {self.host} {what if reported is not sensor else 'sends no new report'}"
            f" after {self._delay_seconds():.0f} s: {RESTART}, or see"
            f" {self.execd.folder if self.execd else ''}/messages, then run it again"
        )

    def _delay_seconds(self) -> float:
        """Return in how many seconds execd and qmaster follow a change of configuration."""
        lines = effective_host_conf(self.qconf, self.host)
        return _REPORTS * parse_clock_seconds(lines.get("load_report_time", "")) + _SLACK_SECONDS


def parse_clock_seconds(text: str) -> int:
    """Return `00:00:40` in seconds, 40 (Grid Engine's default) for anything else."""
    try:
        hours, minutes, seconds = map(int, text.split(":"))
    except ValueError:
        return _DEFAULT_SECONDS
    return hours * 3600 + minutes * 60 + seconds
