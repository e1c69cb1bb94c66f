# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at where systemd runs the services: their files, their state, their drop-ins.

A drop-in is judged by what systemd makes of it, not by its text: `systemctl show` says what counts
in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import FAULT, WARNING, Check, examine, good, warning
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import (
    ETC,
    SystemdOptions,
    installation,
    own_files,
    place_of,
    record_of,
    services,
    unit_file,
)
from gpulock.install.systemd.manager import ON, Service, Systemctl, properties
from gpulock.install.systemd.units import DAEMON, EXPORTER, USER, rendered
from gpulock.node.settings import Settings

_AGAIN: Final = "run gpulock install systemd again"
_CAPABILITIES: Final = frozenset(("cap_sys_ptrace", "cap_dac_override"))
_RUN: Final = "/run/"


@dataclass(frozen=True)
class Rule:
    """What a property of a unit must not be, and what it costs."""

    unit: str
    name: str
    breaks: Callable[[str, Settings], bool]
    costs: str
    state: str = FAULT


def lacks_sight(value: str, _: Settings) -> bool:
    """Say whether capabilities are missing without which gpulockd sees only root's processes."""
    return not {*value.lower().split()} >= _CAPABILITIES


def holds_locks(value: str, settings: Settings) -> bool:
    """Say whether systemd takes LOCK_DIR, or what is above it, for a service's own to remove."""
    return any(
        f"{settings.lock_dir}/".startswith(f"{_RUN}{name.partition(':')[0]}/")
        for name in value.split()
    )


def not_(*wanted: str) -> Callable[[str, Settings], bool]:
    """Return what says whether a property has none of these values."""
    return lambda value, _: value not in wanted


def one_of(*bad: str) -> Callable[[str, Settings], bool]:
    """Return what says whether a property has one of these values."""
    return lambda value, _: value in bad


_FREES: Final = "it cannot see all processes, so it frees nothing"
RULES: Final = (
    Rule(DAEMON, "CapabilityBoundingSet", lacks_sight, _FREES),
    Rule(DAEMON, "ProtectProc", not_("", "default"), _FREES),
    Rule(DAEMON, "ProcSubset", not_("", "all"), _FREES),
    Rule(DAEMON, "PrivateUsers", not_("", "no"), _FREES),
    Rule(DAEMON, "User", not_("", "root", "0"), "gpulockd must be root"),
    Rule(DAEMON, "RuntimeDirectory", holds_locks, "the locks are removed when it stops"),
    Rule(EXPORTER, "RuntimeDirectory", holds_locks, "the locks are removed when it stops"),
    Rule(DAEMON, "PrivateDevices", not_("", "no"), "it cannot tell the devices' nodes", WARNING),
    Rule(DAEMON, "Restart", not_("on-failure", "always"), "it stays dead once it died", WARNING),
    Rule(DAEMON, "WatchdogUSec", one_of("0", "infinity"), "if it hangs, it hangs on", WARNING),
    Rule(
        EXPORTER,
        "DynamicUser",
        not_("", "no"),
        "its worker is no system user's, and is taken for what a job left behind: no GPU gets free",
    ),
    Rule(EXPORTER, "User", not_(USER), f"it is meant to be {USER}", WARNING),
    Rule(EXPORTER, "PrivateDevices", not_("", "no"), "it sees no GPU"),
    Rule(
        EXPORTER,
        "ProtectProc",
        not_("", "default"),
        "it cannot tell whose the processes on a GPU are",
        WARNING,
    ),
)


def systemd_checks(
    settings: Settings, config: Path, etc: Path = ETC, ctl: Systemctl = manager.systemctl
) -> list[Check]:
    """Return the checks of the services; none where they were not installed for systemd."""
    options = SystemdOptions(config, etc=etc, ctl=ctl)
    if not manager.RUNNING.is_dir():
        return []
    if not record_of(settings).load() and not unit_file(etc, DAEMON).exists():
        return []
    checks = examine("units", lambda: units(options, settings))
    for service in services(ctl):
        checks += examine(service.name, partial(state, service, settings, etc, ctl))
    return checks


def units(options: SystemdOptions, settings: Settings) -> Iterator[Check]:
    """Look whether the files are what would be installed now."""
    found, note = installation(options, settings)
    if note:
        yield warning("units", f"were not compared: {note}")
        return
    old: list[str] = []
    for name, text in rendered(found).items():
        path = unit_file(options.etc, name)
        if place_of(path).read() != text:
            old.append(str(path))
    if old:
        what = f"not as this package and its settings want them: {', '.join(old)}"
        yield warning("units", what, _AGAIN)
    else:
        yield good("units", f"{options.etc}/systemd/system, up to date")


def state(service: Service, settings: Settings, etc: Path, ctl: Systemctl) -> Iterator[Check]:
    """Look whether a service runs, as it was installed."""
    now = service.read()
    if now != ON:
        do = f"systemctl enable --now {' '.join(service.units)}"
        yield warning(service.name, f"is {now or 'not there'}", do if now else _AGAIN)
    broken = False
    for unit in service.units:
        for check in effective(unit, settings, etc, properties(unit, (), ctl)):
            broken = True
            yield check
    if now != ON:
        return
    if why := service.aged(own_files(service, etc)):
        yield warning(service.name, why, f"systemctl restart {' '.join(service.units)}")
    elif not broken:
        yield good(service.name, ON)


def effective(unit: str, settings: Settings, etc: Path, seen: Mapping[str, str]) -> Iterator[Check]:
    """Judge what systemd makes of a unit and its drop-ins; pure."""
    if seen.get("LoadState") == "not-found":
        return
    fragment = seen.get("FragmentPath", "")
    if fragment and Path(fragment) != unit_file(etc, unit):
        yield warning(
            unit, f"systemd goes by {fragment}, not by what was installed", f"remove {fragment}"
        )
    where = seen.get("DropInPaths", "")
    do = f"look at {where}" if where else _AGAIN
    for rule in RULES:
        value = seen.get(rule.name, "")
        if rule.unit == unit and rule.name in seen and rule.breaks(value, settings):
            yield Check(unit, rule.state, f"{rule.name}={value}: {rule.costs}", do)
