# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge`: put back what the record of the installation says was there before."""

from __future__ import annotations

import syslog
import time
from collections.abc import Callable
from pathlib import Path

from gpulock.errors import one_line
from gpulock.install import commands
from gpulock.install.change import FilePlace, FolderPlace, Place, undo_recorded_changes
from gpulock.install.hooks import InstallError
from gpulock.install.sge.install import (
    REPORTED,
    SENSOR,
    current_settings,
    queue_instances,
    sge_install_record,
)
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
from gpulock.install.versions import InstalledHooks, list_locked_devices
from gpulock.node.settings import Settings


def undo_sge_install(
    config: Path, echo: Callable[[str], None], *, force: bool = False, reason: str = ""
) -> list[str]:
    """Put back what was there before; return what was left as it is, and why.

    Raises InstallError while devices are locked: without its epilog no job gives them back. With
    `force` a reason is needed.
    """
    settings, given = current_settings(config)
    record = sge_install_record(settings)
    entries = record.load()
    if not entries:
        return []
    locked = list_locked_devices(Path(settings.lock_dir))
    if locked and not (force and reason):
        raise InstallError(
            f"{len(locked)} devices are locked ({' '.join(locked)}): wait for their jobs, or"
            " --force --reason TEXT"
        )
    if locked:
        log_forced_uninstall(f"uninstalled by force while {' '.join(locked)} were locked: {reason}")
    undo = SgeUndo(settings, given, list(entries), echo)
    left = undo_recorded_changes(record, undo.place, echo, undo.reason_to_keep)
    if not left:
        FolderPlace(record.path.parent).write(None)
    return left


def log_forced_uninstall(sentence: str) -> None:
    """Leave a line for the administrator."""
    syslog.openlog("gpulock", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, one_line(f"gpulock: {sentence}"))


class SgeUndo:
    """Places by their address, and what must stay for now."""

    def __init__(
        self,
        settings: Settings,
        given: frozenset[str],
        addresses: list[tuple[str, ...]],
        echo: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.echo = echo
        self.prefixes = [address[1] for address in addresses if address[0] == "hooks"]
        self.had_sensor = any(a[0] == "configuration" and a[2] == "load_sensor" for a in addresses)
        execd = find_execd(
            find_execds(),
            settings.sge_root if "SGE_ROOT" in given else "",
            settings.sge_cell if "SGE_CELL" in given else "",
        )
        self.qconf = find_sge_site(settings, given, execd).qconf()
        hosts = [a[1] for a in addresses if a[0] in ("exechost", "configuration")]
        self.host = sge_host_name(self.qconf, hosts[0] if hosts else "")

    def place(self, address: tuple[str, ...]) -> Place:
        """Return the place that an address of the record means; raise InstallError."""
        kind, *rest = address
        if kind == "file":
            return FilePlace(Path(rest[0]), int(rest[1], 8))
        if kind == "hooks":
            lock_dir = Path(self.settings.lock_dir)
            return InstalledHooks(Path(rest[0]), Path(rest[1]), rest[2], lock_dir)
        if kind == "queue":
            return QueueAttribute(self.qconf, rest[0], rest[1])
        if kind == "exechost":
            return HostValue(self.qconf, rest[0], rest[1])
        if kind == "configuration":
            return HostConfiguration(self.qconf, rest[0], rest[1])
        if kind == "complex":
            return Complex(
                self.qconf, rest[0], self.config_delay_seconds() if self.had_sensor else 0.0
            )
        raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")

    def reason_to_keep(self, address: tuple[str, ...]) -> str:
        """Return why a place must stay as it is for now: something still refers to it."""
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
        for hook in commands.HOOKS
        if f"{prefix}/"
        in (effective_sge_hook(qconf, instance.partition("@")[0], host, hook, lines) or "")
    ]
    return found + [
        f"{name} of host {host}"
        for name in ("load_sensor", "shepherd_cmd")
        if f"{prefix}/" in lines.get(name, "")
    ]
