# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge`: what must change on a node and in its cluster, and how it is taken back.

A hook that is missing on a node puts every job there into error, so the queue's prolog is set for
this host alone, once its hooks are in place; `all_hosts` sets it for the whole queue.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install import commands
from gpulock.install.change import (
    Change,
    FilePlace,
    FolderPlace,
    InstallRecord,
    apply_changes,
    plan_place_change,
)
from gpulock.install.hooks import InstallError
from gpulock.install.sge.places import (
    Complex,
    HostConfiguration,
    HostValue,
    QueueAttribute,
    effective_host_conf,
    effective_sge_hook,
)
from gpulock.install.sge.qconf import Qconf, is_sge_none
from gpulock.install.sge.site import (
    Execd,
    SgeSite,
    find_execd,
    find_execds,
    find_sge_site,
    sge_host_name,
)
from gpulock.install.sge.texts import (
    complex_fault,
    login_script_text,
    sge_admin_user,
    sge_settings_text,
)
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX, InstalledHooks
from gpulock.node import devices
from gpulock.node.settings import DEFAULT_PATH, Settings, parse_settings, read_settings

SENSOR: Final = "prolog/sge-sensor"
REPORTED: Final = ("gpu.free", "gpu.held", "gpu.stale", "gpu.quarantined")
PROFILE: Final = Path("/etc/profile.d/gpulock.sh")
# gpu's fields behind name and shortcut: type relop requestable consumable default urgency
_CONSUMABLE: Final = "INT <= YES YES 0 0"
_LOAD_VALUE: Final = "INT <= YES NO 0 0"


@dataclass(frozen=True)
class SgeOptions:
    """What the administrator asks for; what is None or empty is found out."""

    queues: tuple[str, ...]
    gpus: int | None = None
    complex: str = "gpu"
    host: str = ""
    all_hosts: bool = False
    prefix: Path = DEFAULT_PREFIX
    config: Path = Path(DEFAULT_PATH)
    interpreter: str = sys.executable
    sge_root: str = ""
    sge_cell: str = ""
    profile: Path = PROFILE


@dataclass
class InstallPlan:
    """The changes in the order they are made, and what the administrator should know."""

    record: InstallRecord
    changes: list[Change] = field(default_factory=list[Change])
    notes: list[str] = field(default_factory=list[str])

    def apply(self, echo: Callable[[str], None]) -> None:
        """Make all changes; raise InstallError at the first that fails."""
        apply_changes(self.changes, self.record, echo)


def plan_sge(options: SgeOptions) -> InstallPlan:
    """Return what must change for a node's jobs to get GPUs; raise InstallError."""
    settings, given = current_settings(options.config)
    execd = find_execd(
        find_execds(),
        options.sge_root or (settings.sge_root if "SGE_ROOT" in given else ""),
        options.sge_cell or (settings.sge_cell if "SGE_CELL" in given else ""),
    )
    site = find_sge_site(settings, given, execd, options.sge_root, options.sge_cell)
    return SgePlanner(options, settings, given, execd, site).plan()


def current_settings(path: Path) -> tuple[Settings, frozenset[str]]:
    """Return the settings as they are, and the keys that the file gives."""
    text = FilePlace(path).read()
    if text is None:
        return Settings({}, str(path)), frozenset()
    try:
        settings = read_settings(str(path))
    except Refusal as refusal:
        raise InstallError(f"{refusal.why}; {refusal.do}") from refusal
    return settings, frozenset(re.findall(r"(?m)^\s*([A-Z_]+)\s*=", text))


class SgePlanner:
    """Find out what is there, step by step."""

    def __init__(
        self,
        options: SgeOptions,
        settings: Settings,
        given: frozenset[str],
        execd: Execd | None,
        site: SgeSite,
    ) -> None:
        self.options = options
        self.settings = settings
        self.given = given
        self.execd = execd
        self.site = site
        self.qconf = site.qconf()
        self.host = sge_host_name(self.qconf, options.host)
        self.current = options.prefix / CURRENT
        self.lines = effective_host_conf(self.qconf, self.host)
        self.instances = queue_instances(self.qconf)
        self.plan_ = InstallPlan(sge_install_record(settings))

    def plan(self) -> InstallPlan:
        """Return the whole plan."""
        add = self.plan_.changes.extend
        for folder in (self.settings.lock_dir, self.settings.state_dir):
            add(self.folder(Path(folder)))
        gpus = self.gpus()
        add(self.config(gpus))
        hooks = InstalledHooks(
            self.options.prefix,
            self.options.config,
            self.options.interpreter,
            Path(self.settings.lock_dir),
        )
        add(plan_place_change(hooks, hooks.wanted()))
        add(self.profile())
        add(self.complexes())
        add(self.amount(gpus))
        add(self.sensor())
        for hook in ("epilog", "prolog"):  # no job may claim before there is an epilog
            for queue in self.options.queues:
                add(self.hook(queue, hook))
        self.note_others()
        return self.plan_

    def note(self, text: str) -> None:
        """Tell the administrator something."""
        self.plan_.notes.append(text)

    def folder(self, path: Path) -> Iterable[Change]:
        """Make LOCK_DIR or STATE_DIR; one that is there is left to `doctor`."""
        place = FolderPlace(path)
        return plan_place_change(place, "uid 0, mode 0755") if place.read() is None else ()

    def gpus(self) -> int:
        """Return how many GPUs this node must have."""
        asked, stated = self.options.gpus, self.settings.expected_gpus
        if asked and stated and asked != stated:
            raise InstallError(
                f"{self.options.config} says EXPECTED_GPUS={stated}, not {asked}; change it"
            )
        try:
            shown = len(devices.read_devices(self.settings.driver_root, self.settings.sys_root))
        except Refusal as refusal:
            if not (asked or stated):
                raise InstallError(f"{refusal.why}; {refusal.do}, or give --gpus") from refusal
            self.note(f"{refusal.why}: no GPU job will start here; {refusal.do}")
            return asked or stated
        count = asked or stated or shown
        if not count:
            raise InstallError("the driver shows no GPU; look at the driver, or give --gpus")
        if count != shown:
            self.note(f"the driver shows {shown} GPUs, not {count}: see gpulock doctor")
        return count

    def config(self, gpus: int) -> Iterable[Change]:
        """Add to the settings file what a hook must know."""
        names = self.settings.sge_complexes
        if "SGE_COMPLEXES" in self.given and self.options.complex not in names:
            raise InstallError(
                f"{self.options.config}: SGE_COMPLEXES={' '.join(names)} lacks"
                f" {self.options.complex}: its jobs would get no lock; add it"
            )
        wanted = {
            "EXPECTED_GPUS": str(gpus),
            **self.site.keys(),
            "SGE_COMPLEXES": self.options.complex,
        }
        place = FilePlace(self.options.config)
        text = sge_settings_text(place.read(), wanted)
        try:
            parse_settings(text, str(self.options.config))
        except ValueError as fault:
            raise InstallError(f"{fault}; correct the file") from fault
        return plan_place_change(place, text)

    def profile(self) -> Iterable[Change]:
        """Install the login script for qlogin, which knows execd's spool directory."""
        spool = self.execd.spool if self.execd else Path(self.lines["execd_spool_dir"], self.host)
        if not self.execd and not spool.is_dir():
            self.note(f"no execd runs here: {self.options.profile} for qlogin is left out")
            return ()
        text = login_script_text(str(spool), self.lines.get("gid_range", ""))
        return plan_place_change(FilePlace(self.options.profile), text)

    def complexes(self) -> Iterator[Change]:
        """Add the complexes; the one that stands for GPUs must be a consumable without default."""
        name = self.options.complex
        place = Complex(self.qconf, name)
        line = place.read()
        if line is None:
            yield Change(place, None, f"{name} {name} {_CONSUMABLE}")
        elif fault := complex_fault(line):
            raise InstallError(f"complex {name}: {fault}; correct it by qconf -mc")
        for reported in REPORTED:
            place = Complex(self.qconf, reported)
            line = place.read()
            if line is None:
                yield Change(place, None, f"{reported} {reported} {_LOAD_VALUE}")

    def amount(self, gpus: int) -> Iterable[Change]:
        """Tell qmaster how many GPUs this host has."""
        place = HostValue(self.qconf, self.host, self.options.complex)
        now = place.read()
        if now is not None and now != str(gpus) and self.options.gpus is None:
            self.note(f"{place.title} stays {now}, though it has {gpus} GPUs; --gpus sets it")
            return ()
        return plan_place_change(place, str(gpus))

    def sensor(self) -> Iterable[Change]:
        """Add the load sensor to those that run on this host already."""
        wanted = f"{self.current}/{SENSOR}"
        found = self.lines.get("load_sensor", "none")
        others = [] if is_sge_none(found) else [word.strip() for word in found.split(",")]
        if wanted in others:
            return ()
        others = [word for word in others if not word.endswith(f"/{SENSOR}")]
        return plan_place_change(
            HostConfiguration(self.qconf, self.host, "load_sensor"), ",".join([*others, wanted])
        )

    def hook(self, queue: str, hook: str) -> Iterable[Change]:
        """Set a queue's prolog or epilog, with the one in force behind it."""
        if f"{queue}@{self.host}" not in self.instances:
            raise InstallError(f"queue {queue} is not on host {self.host}; see qconf -sq {queue}")
        now = effective_sge_hook(self.qconf, queue, self.host, hook, self.lines)
        site = commands.site_command_of(now, hook)
        if self.options.all_hosts:
            self.check_all_hosts(queue, hook, site)
        if site is not None:
            self.note_site(queue, hook, site)
        wanted = commands.queue_hook_command(self.current, hook, site)
        domain = queue if self.options.all_hosts else f"{queue}@{self.host}"
        return (
            ()
            if now == wanted
            else plan_place_change(QueueAttribute(self.qconf, domain, hook), wanted)
        )

    def check_all_hosts(self, queue: str, hook: str, site: str | None) -> None:
        """Raise InstallError where one line would replace different hooks on different hosts."""
        for instance in self.instances:
            name, _, host = instance.partition("@")
            if name != queue or host == self.host:
                continue
            theirs = commands.site_command_of(
                effective_sge_hook(self.qconf, queue, host, hook), hook
            )
            if theirs != site:
                raise InstallError(
                    f"the {hook} of {queue} is {site or 'none'} on {self.host} and"
                    f" {theirs or 'none'} on {host}; install host by host, without --all-hosts"
                )

    def note_site(self, queue: str, hook: str, site: str) -> None:
        """Say that the site's hook goes on running, and what is odd about it."""
        self.note(f"{queue}: the {hook} in force goes on running with ours: {site}")
        program = commands.command_program(site)
        if program.is_absolute() and not program.exists():
            self.note(f"{queue}: {program} does not exist here: jobs would fail as they do now")
        if why := commands.rival_hook_reason(site):
            self.note(f"{queue}: does this {hook} hand out GPUs itself ({why})? Then take it out")

    def note_others(self) -> None:
        """Warn of what lets jobs past the hooks, or breaks them."""
        for instance in self.instances:
            queue, _, host = instance.partition("@")
            if host != self.host or queue in self.options.queues:
                continue
            line = effective_sge_hook(self.qconf, queue, host, "prolog", self.lines)
            if not commands.is_gpulock_command(line, "prolog"):
                self.note(f"queue {queue} is on this host too, and its jobs get no locks: --queue?")
        if sge_admin_user(self.site) not in ("none", "root"):
            self.note(
                "qrsh and qlogin with a terminal break as soon as a prolog exists, because"
                f" admin_user is {sge_admin_user(self.site)}: use -pty no, or admin_user none"
            )


def queue_instances(qconf: Qconf) -> list[str]:
    """Return every QUEUE@HOST of the cluster."""
    return [word for word in qconf.run("qselect").split() if "@" in word]


def sge_install_record(settings: Settings) -> InstallRecord:
    """Return where it is noted what was installed."""
    return InstallRecord(Path(settings.state_dir, "install/sge.json"))
