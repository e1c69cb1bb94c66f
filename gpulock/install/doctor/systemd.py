# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at where systemd runs the services: their files, their state, their drop-ins.

A drop-in is judged by what systemd makes of it, not by its text: `systemctl show` says what counts
in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import FAULT, INSTALLED, WARNING, Check, Finding, warning
from gpulock.install.items import Wanted
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import (
    DROP_IN,
    SystemdOptions,
    drop_ins_of,
    etc_items,
    service_items,
    unit_items,
)
from gpulock.install.systemd.manager import ON, UNUSED, unit_properties
from gpulock.install.systemd.units import (
    DAEMON,
    EXPORTER,
    USER,
    says_more,
    setting_directives,
)
from gpulock.node.settings import Settings
from gpulock.store.locks import claims_root

_AGAIN: Final = "gpulock install systemd"
_SEES: Final = frozenset(("cap_sys_ptrace", "cap_dac_override"))  # others' processes
_LOG: Final = "cap_syslog"
_XIDS: Final = "it cannot read the kernel's log, so XIDs are not known"
_NEVER: Final = ("0", "infinity")
_RUN: Final = "/run/"
_CAPABILITIES: Final = "CapabilityBoundingSet"
EXACT: Final = (  # what systemd tells of a unit as it stands there
    "DevicePolicy",
    "KillMode",
    "MemoryDenyWriteExecute",
    "NoNewPrivileges",
    "ProtectControlGroups",
)


@dataclass(frozen=True)
class UnitRule:
    """What a property of a unit must not be, and what it costs."""

    unit: str
    name: str
    breaks: Callable[[str, Settings], bool]
    costs: str
    state: str = FAULT


def manages_lock_dir(value: str, settings: Settings) -> bool:
    """Say whether systemd takes locks or records, or what is above, for a service's to remove."""
    ours = (settings.lock_dir, claims_root(settings.lock_dir))
    taken = tuple(f"{_RUN}{name.partition(':')[0]}/" for name in value.split())
    return any(f"{path}/".startswith(taken) for path in ours)


def unless(*wanted: str) -> Callable[[str, Settings], bool]:
    """Return what says whether a property has none of these values."""
    return lambda value, _: value not in wanted


NO: Final = unless("", "no")
_FREES: Final = "it cannot see all processes, so it frees nothing"
_LOCKS: Final = "the locks are removed when it stops"
_WORKER: Final = "its worker is no system user's: its processes keep every GPU of a job held"
RULES: Final = (
    UnitRule(DAEMON, _CAPABILITIES, lambda now, _: not {*now.lower().split()} >= _SEES, _FREES),
    UnitRule(DAEMON, _CAPABILITIES, lambda now, _: _LOG not in now.lower().split(), _XIDS, WARNING),
    UnitRule(DAEMON, "ProtectKernelLogs", NO, _XIDS, WARNING),
    UnitRule(DAEMON, "ProtectProc", unless("", "default"), _FREES),
    UnitRule(DAEMON, "ProcSubset", unless("", "all"), _FREES),
    UnitRule(DAEMON, "PrivateUsers", NO, _FREES),
    UnitRule(DAEMON, "User", unless("", "root", "0"), "gpulockd must be root"),
    UnitRule(DAEMON, "RuntimeDirectory", manages_lock_dir, _LOCKS),
    UnitRule(EXPORTER, "RuntimeDirectory", manages_lock_dir, _LOCKS),
    UnitRule(DAEMON, "PrivateDevices", NO, "it cannot recognise device nodes", WARNING),
    UnitRule(DAEMON, "Restart", unless("on-failure", "always"), "it stays dead", WARNING),
    UnitRule(
        DAEMON, "WatchdogUSec", lambda now, _: now in _NEVER, "if it hangs, it hangs on", WARNING
    ),
    UnitRule(EXPORTER, "DynamicUser", NO, _WORKER),
    UnitRule(EXPORTER, "User", unless(USER), f"it is meant to be {USER}", WARNING),
    UnitRule(EXPORTER, "PrivateDevices", NO, "it sees no GPU"),
    UnitRule(EXPORTER, "ProtectProc", unless("", "default"), "it sees no users", WARNING),
)


def systemd_checks(settings: Settings, options: SystemdOptions) -> list[Check]:
    """Return the checks of the services; none where nobody installed, enabled or started any."""
    if not manager.RUNNING.is_dir():
        return []
    return [Check("services", lambda: check_services(settings, options), (INSTALLED,))]


def check_services(settings: Settings, options: SystemdOptions) -> Iterator[Finding]:
    """Compare files and services with what would be installed; raise InstallError."""
    files = unit_items(options, drop_ins_of(options, settings))
    here = any(item.place.read() is not None for own in files.values() for item in own)
    services = [one for one in service_items(options, files) if here or one.read() not in UNUSED]
    own = [item for one in services for unit in one.units for item in files[unit]]
    differ = [
        str(item.path)
        for item in (*(etc_items(options) if services else ()), *own)
        if item.show(Wanted.PRESENT) and (item.place.read() is not None or says_more(item.value))
    ]
    if differ:
        yield warning(f"not as package and settings want them: {', '.join(differ)}", _AGAIN)
    for service in services:
        running = service.read() == ON  # else the checks of both programs say so
        if running and not differ and (why := service.restart_reason()):
            yield warning(why, _AGAIN, service.name)
        for unit in service.units:
            seen = unit_properties(unit, (), options.ctl)
            yield from check_unit_properties(unit, settings, options.unit_path(unit), seen)


def check_unit_properties(
    unit: str, settings: Settings, path: Path, seen: Mapping[str, str]
) -> Iterator[Finding]:
    """Judge what systemd makes of a unit and its drop-ins; raise OSError."""
    if seen.get("LoadState") == "not-found":
        return
    fragment = seen.get("FragmentPath", "")
    if fragment and Path(fragment).resolve() != path.resolve():
        what = f"systemd uses {fragment}, not the installed unit"
        yield warning(what, f"remove {fragment}" if path.exists() else _AGAIN, unit)
    sites = [one for one in seen.get("DropInPaths", "").split() if not one.endswith(f"/{DROP_IN}")]
    do = f"look at {' '.join(sites)}" if sites else _AGAIN
    for rule in RULES:
        value = seen.get(rule.name, "")
        if rule.unit == unit and rule.name in seen and rule.breaks(value, settings):
            yield Finding(unit, rule.state, f"{rule.name}={value}: {rule.costs}", do)
    if unit == DAEMON:
        for name, lines in setting_directives(settings).items():
            if lacks := unmet_directives(lines, seen):
                yield Finding(unit, WARNING, f"{name} does not work without {'; '.join(lacks)}", do)


def unmet_directives(lines: Iterable[str], seen: Mapping[str, str]) -> list[str]:
    """Return which directives a setting needs and systemd does not go by; pure."""
    unmet: list[str] = []
    for line in lines:
        name, _, wanted = line.partition("=")
        now = seen.get(name)
        if now is None:
            continue
        if name == _CAPABILITIES:
            missing = [word for word in wanted.split() if word.lower() not in now.lower().split()]
            unmet += [f"{name}={' '.join(missing)}"] if missing else []
        elif name in EXACT and now != wanted:
            unmet.append(line)
    return unmet
