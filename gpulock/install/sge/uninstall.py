# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge`: what is taken back on a node and in its cluster, and what must stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpulock.install.change import Place
from gpulock.install.sge.cards import restore_card_ids
from gpulock.install.sge.host_report import REPORTED, SENSOR, HostReport
from gpulock.install.sge.places import (
    Complex,
    HostConfiguration,
    HostValue,
    QueueAttribute,
    find_hook_references,
)
from gpulock.install.sge.site import find_own_execd, find_sge_site, sge_host_name
from gpulock.install.undo import FORCE, WAIT_OR_REAP, Address, Uninstaller
from gpulock.install.versions import list_locked_devices
from gpulock.sge.card_map import NAME as SGE_MAP


class SgeUninstaller(Uninstaller):
    """Grid Engine's part of a node and of its cluster."""

    scheduler = "sge"
    sensor_stays = ""

    def obstacles(self) -> Iterator[tuple[str, str]]:
        if locked := list_locked_devices(Path(self.settings.lock_dir)):
            what = f"{len(locked)} devices are locked ({' '.join(locked)})"
            yield what, f": {WAIT_OR_REAP}, or {FORCE}"

    def begin(self) -> None:
        addresses = list(self.record.load())
        self.prefixes = [address[1] for address in addresses if address[0] == "hooks"]
        execd = find_own_execd(self.settings, self.given)
        self.site = find_sge_site(self.settings, self.given, execd)
        self.qconf = self.site.qconf()
        named = [a[1] for a in addresses if a[0] in ("exechost", "configuration")]
        host = next((one for one in named if one != "global"), "")
        self.host = sge_host_name(self.qconf, host)

    def place(self, address: Address) -> Place:
        kind, name, *rest = address
        places = {place.kind: place for place in (QueueAttribute, HostValue, HostConfiguration)}
        if kind in places:
            return places[kind](self.qconf, name, rest[0])
        if kind == Complex.kind:
            return Complex(self.qconf, name, HostReport(self.qconf, self.host).delay_seconds())
        return super().place(address)

    def reason_to_keep(self, address: Address) -> str:
        if address[0] == "hooks" or (address[0], address[1]) == ("file", self.settings.path):
            is_master = self.site.is_master(self.host)
            for prefix in self.prefixes:
                if users := find_hook_references(self.qconf, self.host, prefix, is_master):
                    return f"{address[1]} stays: {users[0]} leads to the hooks"
            return self.sensor_reports()
        if address[0] == "file" and address[1].endswith(f"/{SGE_MAP}"):
            return restore_card_ids(self.settings.state_dir, self.host, self.qconf.run)
        if address[0] == "complex":
            users = [host for host in self.qconf.names("-sel") if self.uses(host, address[1])]
            if users:
                return f"complex {address[1]} stays: host {users[0]} uses it"
            return self.sensor_reports()
        return ""

    def sensor_reports(self) -> str:
        """Wait, once, until execd has stopped our sensor; return why not, or nothing."""
        wait = f"waiting for execd of {self.host} to stop the load sensor"
        report = HostReport(self.qconf, self.host)
        if not self.sensor_stays and not report.wait_sensor(False, lambda: self.echo(wait)):
            self.sensor_stays = f"execd of {self.host} still runs the load sensor"
        return self.sensor_stays and f"{self.sensor_stays}; run it again later"

    def uses(self, host: str, name: str) -> bool:
        """Say whether a host has some of a complex, or a sensor that reports it."""
        if HostValue(self.qconf, host, name).read() is not None:
            return True
        lines = self.qconf.configuration(host) or {}
        return name in REPORTED and f"/{SENSOR}" in lines.get("load_sensor", "")
