# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall sge`: what leads to gpulock is taken out of this host's lines, or is named.

A line is changed only where nothing else changes by that: without ours the same runs here. No
earlier value is written; what one would be is not known, for an administrator wrote since.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from gpulock.install.change import Address
from gpulock.install.hooks import InstallError
from gpulock.install.sge.cards import restore_card_ids
from gpulock.install.sge.host_report import REPORTED, HostReport
from gpulock.install.sge.places import (
    QueueAttribute,
    effective_host_conf,
    queue_instances,
    read_complexes,
    write_host_conf,
)
from gpulock.install.sge.qconf import is_sge_none, parse_host_overrides, parse_sge_list
from gpulock.install.sge.site import find_own_execd, find_sge_site, sge_host_name
from gpulock.install.sge.texts import is_gpulock_command, queue_hook_command, site_command_of
from gpulock.install.uninstall import FORCE, WAIT_OR_REAP, Uninstaller
from gpulock.install.versions import CURRENT, InstalledHooks, list_locked_devices
from gpulock.sge.card_map import NAME as SGE_MAP

FREE_FIRST = "once no device is locked (gpulock status), the epilog:"
_LINES = ("load_sensor", "shepherd_cmd")  # of a host's configuration


class SgeUninstaller(Uninstaller):
    """Grid Engine's part of a node and of its cluster."""

    scheduler = "sge"
    detached: ClassVar = frozenset(("configuration", "queue", "exechost", "complex"))

    def obstacles(self) -> Iterator[tuple[str, str]]:
        if locked := list_locked_devices(Path(self.settings.lock_dir)):
            what = f"{len(locked)} devices are locked ({' '.join(locked)})"
            yield what, f": {WAIT_OR_REAP}, or {FORCE}"

    def detach(self) -> list[str]:
        """Take our lines out: prolog, epilog once nothing is locked, sensor and shepherd."""
        addresses = [*self.record.load()]
        prefixes = [Path(a[1]) for a in addresses if a[0] == InstalledHooks.kind]
        self.currents = [prefix / CURRENT for prefix in prefixes]
        self.execd = find_own_execd(self.settings, self.given)
        self.site = find_sge_site(self.settings, self.given, self.execd)
        self.qconf = self.site.qconf()
        named = [a[1] for a in addresses if a[0] == "configuration" and a[1] != "global"]
        self.host = sge_host_name(self.qconf, next(iter(named), ""))
        if left := self.take_out_hook("prolog"):
            return [*left, FREE_FIRST, *self.take_out_hook("epilog", write=False)]
        if locked := list_locked_devices(Path(self.settings.lock_dir)):
            return [f"the epilog stays while {len(locked)} devices are locked"]
        left = self.take_out_hook("epilog") or self.take_out_host_lines()
        return left or self.stop_sensor()

    def is_ours(self, value: str | None) -> bool:
        """Return whether a value names a program below one of our folders."""
        return any(f"{current}/" in (value or "") for current in self.currents)

    def take_out_hook(self, hook: str, write: bool = True) -> list[str]:
        """Take a hook out of the queues' lines for this host; return how to do the rest.

        With `write` false nothing is written, and all of it is returned.
        """
        left: list[str] = []
        conf = effective_host_conf(self.qconf, self.host)
        here = [one.partition("@") for one in queue_instances(self.qconf)]
        queues = [queue for queue, _, host in here if host == self.host]
        for queue in queues:
            default, overrides = parse_host_overrides(self.qconf.show("-sq", queue)[hook])
            value = overrides.get(self.host)
            behind = conf.get(hook) if is_sge_none(default) else default
            groups = any(domain.startswith("@") for domain in overrides)
            if write and value and not groups and self.is_unchanged(value, hook, behind):
                place = QueueAttribute(self.qconf, f"{queue}@{self.host}", hook)
                place.write(None)
                if place.read() is not None:
                    raise InstallError(f"{place.title} is still there; run it again")
                self.echo(f"removed: {place.title}")
                overrides.pop(self.host)
            lines = {queue: default, **{f"{queue}@{name}": v for name, v in overrides.items()}}
            left += [
                self.by_hand(name, hook, v)
                for name, v in lines.items()
                if self.is_ours(v) and self.concerns_host(name, queue, overrides)
            ]
        if queues and self.is_ours(conf.get(hook)):
            left.append(f"qconf -mconf: a line of {hook} has {conf[hook]}")
        return left

    def by_hand(self, domain: str, hook: str, value: str) -> str:
        """Return how a hook is taken out of a queue's line; the site's command in it stays."""
        if not is_gpulock_command(value, hook):
            return f"qconf -mq {domain}: {hook} {value}"
        site = site_command_of(value, hook) or "NONE"
        return f"qconf -rattr queue {hook} {shlex.quote(site)} {domain}"

    def concerns_host(self, domain: str, queue: str, overrides: dict[str, str]) -> bool:
        """Return whether a line may be in force here: this host's, a group's, or the queue's."""
        if domain == queue:
            return self.host not in overrides
        return domain == f"{queue}@{self.host}" or domain.startswith(f"{queue}@@")

    def is_unchanged(self, value: str, hook: str, behind: str | None) -> bool:
        """Return whether a host's line is as gpulock writes it, around what runs without it."""
        site = site_command_of(value, hook)
        if site != (None if is_sge_none(behind) else behind):
            return False
        try:
            return value in [queue_hook_command(one, hook, site) for one in self.currents]
        except InstallError:
            return False

    def take_out_host_lines(self) -> list[str]:
        """Take sensor and shepherd out of the host's configuration; return how to do the rest."""
        found = self.qconf.configuration(self.host)
        shared = self.qconf.configuration("global") or {}
        own = dict(found or {})
        for name in _LINES:
            if name in own and self.is_ours(own[name]):
                rest = self.without_ours(own.pop(name))
                if rest != self.without_none(shared.get(name)):
                    own[name] = rest
        if found is not None and own != found:
            write_host_conf(self.qconf, self.host, found, own or self.sensor_line(shared))
            self.echo(f"removed: {' and '.join(_LINES)} of host {self.host}")
        names = [*_LINES, *(["jsv_url"] if self.site.is_master(self.host) else [])]
        return [
            f"qconf -mconf: {name} {self.without_ours(shared[name])}"
            for name in names
            if name not in own and self.is_ours(shared.get(name))
        ]

    def sensor_line(self, shared: dict[str, str]) -> dict[str, str]:
        """Return a configuration that changes nothing: of one that is gone execd hears nothing."""
        return {"load_sensor": self.without_none(shared.get("load_sensor"))}

    def without_ours(self, value: str) -> str:
        """Return a list of programs without ours, `none` where nothing is left."""
        words = [word.strip() for word in value.split(",")]
        return ",".join(word for word in words if not self.is_ours(word)) or "none"

    def without_none(self, value: str | None) -> str:
        """Return a value of the global configuration as Grid Engine goes by it."""
        return "none" if value is None or is_sge_none(value) else value

    def stop_sensor(self) -> list[str]:
        """Wait until execd has stopped our sensor, and starts no shepherd by ours; return why not.

        A sensor that never reported proves nothing: then two later reports do.
        """
        report = HostReport(self.qconf, self.host)
        if self.execd and report.has_sensor_values():
            wait = f"waiting for execd of {self.host} to stop the load sensor"
            if not report.wait_sensor(False, lambda: self.echo(wait)):
                return [f"execd of {self.host} still runs the load sensor: restart it"]
        elif self.execd:
            wait = f"waiting for execd of {self.host} to take its configuration"
            if not report.wait_new_reports(lambda: self.echo(wait)):
                return [f"execd of {self.host} sends no report: restart it"]
        shared = self.qconf.configuration("global") or {}
        if self.qconf.configuration(self.host) == self.sensor_line(shared):
            self.qconf.run("qconf", "-dconf", self.host)
        self.stays = self.list_remains()
        return []

    def list_remains(self) -> list[str]:
        """Return what stays in the cluster, which other hosts and the site may use."""
        names = [*self.settings.sge_complexes, *REPORTED]
        values = parse_sge_list(self.qconf.show("-se", self.host)["complex_values"])
        found = [
            f"stays: qconf -dattr exechost complex_values {name} {self.host}"
            for name in names
            if name in values
        ]
        if there := [name for name in names if name in read_complexes(self.qconf)]:
            found.append(f"stay for other hosts: qconf -mc, complexes {' '.join(there)}")
        return found

    def reason_to_keep(self, address: Address) -> str:
        if address[0] == "file" and address[1].endswith(f"/{SGE_MAP}"):
            return restore_card_ids(self.settings.state_dir, self.host, self.qconf.run)
        return ""

    def end(self) -> None:
        for line in self.stays:
            self.echo(line)
