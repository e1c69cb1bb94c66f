# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge`: put back what the record of the installation says was there before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gpulock.install.change import Place
from gpulock.install.sge.install import REPORTED, SENSOR, queue_instances
from gpulock.install.sge.places import (
    Complex,
    HostConfiguration,
    HostValue,
    QueueAttribute,
    effective_host_conf,
    effective_sge_hook,
)
from gpulock.install.sge.qconf import Qconf, parse_sge_list
from gpulock.install.sge.site import find_execd, find_execds, find_sge_site, sge_host_name
from gpulock.install.sge.texts import HOOKS
from gpulock.install.undo import FORCE, Address, Uninstaller
from gpulock.install.versions import list_locked_devices


class SgeUninstaller(Uninstaller):
    """Grid Engine's part of a node and of its cluster."""

    scheduler = "sge"

    def obstacles(self) -> Iterator[tuple[str, str]]:
        if locked := list_locked_devices(Path(self.settings.lock_dir)):
            what = f"{len(locked)} devices are locked ({' '.join(locked)})"
            yield what, f": wait for their jobs, or {FORCE}"

    def begin(self) -> None:
        addresses = list(self.record.load())
        self.prefixes = [address[1] for address in addresses if address[0] == "hooks"]
        self.had_sensor = any(a[0] == "configuration" and a[2] == "load_sensor" for a in addresses)
        settings, given = self.settings, self.given
        execd = find_execd(
            find_execds(),
            settings.sge_root if "SGE_ROOT" in given else "",
            settings.sge_cell if "SGE_CELL" in given else "",
        )
        self.qconf = find_sge_site(settings, given, execd).qconf()
        hosts = [a[1] for a in addresses if a[0] in ("exechost", "configuration")]
        self.host = sge_host_name(self.qconf, hosts[0] if hosts else "")

    def place(self, address: Address) -> Place:
        kind, name, *rest = address
        places = {place.kind: place for place in (QueueAttribute, HostValue, HostConfiguration)}
        if kind in places:
            return places[kind](self.qconf, name, rest[0])
        if kind == Complex.kind:
            return Complex(self.qconf, name, self.config_delay_seconds() if self.had_sensor else 0)
        return super().place(address)

    def reason_to_keep(self, address: Address) -> str:
        if address[0] == "hooks" or (address[0], address[1]) == ("file", self.settings.path):
            for prefix in self.prefixes:
                if users := find_hook_references(self.qconf, self.host, prefix):
                    return f"{address[1]} stays: {users[0]} leads to the hooks"
            return self.sensor_reports() if address[0] == "hooks" else ""
        if address[0] == "complex":
            users = [host for host in self.qconf.names("-sel") if self.uses(host, address[1])]
            if users:
                return f"complex {address[1]} stays: host {users[0]} uses it"
            return self.sensor_reports()
        return ""

    def sensor_reports(self) -> str:
        """Wait until execd has stopped our sensor; return why that did not happen, or nothing.

        execd takes a new configuration within two load_report_times (docs/facts/grid-engine.md).
        """
        if not self.had_sensor:
            return ""
        deadline = time.monotonic() + self.config_delay_seconds()
        told = False
        while self.reported():
            if time.monotonic() > deadline:
                return f"execd of {self.host} still runs the load sensor; run it again later"
            if not told:
                self.echo(f"waiting for execd of {self.host} to stop the load sensor")
                told = True
            time.sleep(0.5)
        return ""

    def config_delay_seconds(self) -> float:
        """Return in how many seconds execd and qmaster follow a change of configuration."""
        lines = effective_host_conf(self.qconf, self.host)
        return 2.0 * parse_clock_seconds(lines.get("load_report_time", "")) + 10.0

    def reported(self) -> bool:
        """Say whether this host's report still holds values of our sensor."""
        return bool(
            {*REPORTED} & {*parse_sge_list(self.qconf.show("-se", self.host)["load_values"])}
        )

    def uses(self, host: str, name: str) -> bool:
        """Say whether a host has some of a complex, or a sensor that reports it."""
        if HostValue(self.qconf, host, name).read() is not None:
            return True
        lines = self.qconf.configuration(host) or {}
        return name in REPORTED and f"/{SENSOR}" in lines.get("load_sensor", "")


def parse_clock_seconds(text: str) -> int:
    """Return `00:00:40` in seconds, 40 (Grid Engine's default) for anything else."""
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):  # noqa: PLR2004 (h:m:s)
        return 40
    hours, minutes, seconds = map(int, parts)
    return hours * 3600 + minutes * 60 + seconds


def find_hook_references(qconf: Qconf, host: str, prefix: str) -> list[str]:
    """Return what on a host still names a path below `prefix`."""
    lines = effective_host_conf(qconf, host)
    found = [
        f"{hook} of {instance}"
        for instance in queue_instances(qconf)
        if instance.endswith(f"@{host}")
        for hook in HOOKS
        if f"{prefix}/"
        in (effective_sge_hook(qconf, instance.partition("@")[0], host, hook, lines) or "")
    ]
    return found + [
        f"{name} of host {host}"
        for name in ("load_sensor", "shepherd_cmd")
        if f"{prefix}/" in lines.get(name, "")
    ]
