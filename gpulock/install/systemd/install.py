# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd`: gpulockd and the exporter as services of this node.

The units are rendered for this installation and these settings; where either changes, run it
again. Locks are none of systemd's: they outlive every start, stop and upgrade of a service.
"""

from __future__ import annotations

import pwd
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.change import Change, File, Folder, Record, changed
from gpulock.install.hooks import InstallError
from gpulock.install.sge.install import Plan, current_settings
from gpulock.install.systemd import manager
from gpulock.install.systemd.manager import ON, Made, Service, Start, Systemctl, package_files
from gpulock.install.systemd.units import (
    DAEMON,
    EXPORTER,
    LOGROTATE,
    SOCKET,
    UNITS,
    USER,
    Installation,
    minors_of,
    rendered,
)
from gpulock.install.trial import try_interpreter, why_private
from gpulock.isolation.marks import MARK
from gpulock.node import devices
from gpulock.node.settings import DEFAULT_PATH, Settings

SERVICES: Final = {"gpulock-exporter": (SOCKET, EXPORTER), "gpulockd": (DAEMON,)}
ETC: Final = Path("/etc")
_HOMES: Final = ("/root/", "/home/", "/run/user/")  # what ProtectHome=yes hides
_DO: Final = "install gpulock into a folder such as /opt/gpulock"
_SECONDS: Final = 60.0  # for an exporter's imports that were never compiled
_NEEDED: Final = "import gpulock_exporter.app.program, gpulock_exporter.worker.process"


@dataclass(frozen=True)
class SystemdOptions:
    """What the administrator asks for; `etc` is where the files go."""

    config: Path = Path(DEFAULT_PATH)
    python: str = sys.executable
    etc: Path = ETC
    ctl: Systemctl = field(default=manager.systemctl, compare=False)


def record_of(settings: Settings) -> Record:
    """Return where it is noted what was installed for systemd."""
    return Record(Path(settings.state_dir, "install/systemd.json"))


def services(ctl: Systemctl = manager.systemctl) -> list[Service]:
    """Return the services, in the order in which they are started."""
    return [Service(name, units, ctl) for name, units in SERVICES.items()]


def unit_file(etc: Path, name: str) -> Path:
    """Return where one of the rendered files goes."""
    if name == LOGROTATE:
        return etc / "logrotate.d/gpulock"
    return etc / (f"systemd/system/{name}" if name in UNITS else name)


def installation(options: SystemdOptions, settings: Settings) -> tuple[Installation, str]:
    """Return what to render for, and what is odd about it."""
    seen: list[int] = []
    note = ""
    try:
        found = devices.read_devices(settings.driver_root, settings.sys_root)
        seen = [device.minor for device in found]
    except Refusal as refusal:
        note = f"{refusal.why}: run it again once the driver is loaded"
    minors = minors_of(seen, settings.gpus)
    marked = Path(settings.lock_dir, MARK).exists()
    return Installation(options.python, options.config, settings, minors, marked), note


def plan_systemd(options: SystemdOptions) -> Plan:
    """Return what must change for both services to run; raise InstallError."""
    settings, _ = current_settings(options.config)
    if settings.simulation:
        raise InstallError(f"{options.config} is a simulated node's: its services are no system's")
    if not manager.RUNNING.is_dir():
        raise InstallError(
            "systemd does not run here; start gpulockd and gpulock-exporter yourself"
        )
    check_python(options.python)
    plan = Plan(record_of(settings))
    what, note = installation(options, settings)
    plan.notes += [note] if note else []
    for folder in (settings.lock_dir, settings.state_dir):
        place = Folder(Path(folder))
        plan.changes += changed(place, "uid 0, mode 0755") if place.read() is None else ()
    texts = rendered(what)
    plan.changes += files(options.etc, texts)
    touched = {c.place.address[1] for c in plan.changes}
    for service in services(options.ctl):
        own = own_files(service, options.etc)
        stale = next((str(path) for path in own if str(path) in touched), "")
        plan.changes += start(service, own, stale)
    return plan


def own_files(service: Service, etc: Path) -> list[Path]:
    """Return the unit files of a service, then the modules it is made of."""
    packages = {"gpulock-exporter": ("gpulock", "gpulock_exporter")}
    modules = package_files(*packages.get(service.name, ("gpulock",)))
    return [*(unit_file(etc, unit) for unit in service.units), *modules]


def files(etc: Path, texts: dict[str, str]) -> Iterable[Change]:
    """Yield the changes of files: the user before the service that runs as it."""
    for name in sorted(texts, key=lambda name: (name in UNITS, name)):
        yield from changed(place_of(unit_file(etc, name)), texts[name])


def place_of(path: Path) -> File:
    """Return the place of one of the files."""
    if path.parent.name == "sysusers.d":
        return Made(path, program="systemd-sysusers", there=user_exists)
    if path.parent.name == "tmpfiles.d":
        return Made(path, program="systemd-tmpfiles --create")
    return File(path)


def start(service: Service, own: Sequence[Path], stale: str) -> Iterable[Change]:
    """Yield the start of a service that is not on, or not what is installed; raise InstallError."""
    now = service.read()
    if now is not None and "masked" in now:
        raise InstallError(f"{service.title} is masked; systemctl unmask {' '.join(service.units)}")
    why = f"{stale} changes" if stale else ""
    if now == ON and not why:
        why = service.aged(own)
    if now != ON or why:
        yield Start(service, now, ON, why)


def user_exists() -> bool:
    """Say whether the exporter's user is there."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return False
    return True


def check_python(python: str) -> None:
    """Raise InstallError for an interpreter that the exporter's own user cannot use."""
    if not Path(python).is_absolute():
        raise InstallError(f"interpreter {python} is no absolute path")
    for path in (Path(python), Path(python).resolve(), package_files()[0]):
        if str(path).startswith(_HOMES):
            raise InstallError(
                f"{path} is below a home directory, which services do not see; {_DO}"
            )
    if why := why_private(Path(python)):
        raise InstallError(f"interpreter {why}; the exporter runs as {USER}; {_DO}")
    last = try_interpreter(python, ("-I", "-c", _NEEDED), _SECONDS)
    if last:
        raise InstallError(f"{python} cannot run the exporter as nobody ({last}); {_DO}")
