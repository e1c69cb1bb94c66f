# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`: gpulockd and the exporter as services.

The units are rendered for this installation and these settings; where either changes, run it
again. Locks are none of systemd's: they outlive every start, stop and upgrade of a service, and
stay with history when services go. So does the exporter's user: a user's number that is given away
again could own files of the one before.
"""

from __future__ import annotations

import pwd
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from gpulock.errors import Refusal
from gpulock.install.change import Address, Change, FilePlace, Place
from gpulock.install.hooks import InstallError
from gpulock.install.planner import InstallPlan, NodePlanner
from gpulock.install.systemd import manager, units
from gpulock.install.trial import try_interpreter, why_users_cannot_run
from gpulock.install.uninstall import Uninstaller
from gpulock.isolation.marks import MARK
from gpulock.node import devices
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.store.locks import claims_root

SERVICES: Final = {"gpulock-exporter": (units.SOCKET, units.EXPORTER), "gpulockd": (units.DAEMON,)}
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
    ctl: manager.Systemctl = field(default=manager.systemctl, compare=False)
    quarantine_on: str | None = None


def systemd_services(ctl: manager.Systemctl = manager.systemctl) -> list[manager.SystemdService]:
    """Return the services, in the order in which they are started."""
    return [manager.SystemdService(name, units, ctl) for name, units in SERVICES.items()]


def unit_file_path(etc: Path, name: str) -> Path:
    """Return where one of the rendered files goes."""
    if name == units.LOGROTATE:
        return etc / "logrotate.d/gpulock"
    return etc / (f"systemd/system/{name}" if name in units.UNITS else name)


def read_unit_inputs(options: SystemdOptions, settings: Settings) -> tuple[units.UnitInputs, str]:
    """Return what to render for, and what is odd about it."""
    seen: list[int] = []
    note = ""
    try:
        found = devices.read_devices(settings.driver_root, settings.sys_root)
        seen = [device.minor for device in found]
    except Refusal as refusal:
        note = f"{refusal.why}: run it again once the driver is loaded"
    minors = units.card_minors(seen, settings.expected_gpus)
    marked = Path(claims_root(settings.lock_dir), MARK).exists()
    return units.UnitInputs(options.python, options.config, settings, minors, marked), note


def plan_systemd(options: SystemdOptions) -> InstallPlan:
    """Return what must change for both services to run; raise InstallError."""
    planner = NodePlanner(options.config, SystemdUninstaller.scheduler)
    if planner.settings.simulation:
        raise InstallError(f"{options.config} is a simulated node's: its services are no system's")
    if not manager.RUNNING.is_dir():
        raise InstallError(
            "systemd does not run here; start gpulockd and gpulock-exporter yourself"
        )
    check_exporter_python(options.python)
    what, note = read_unit_inputs(options, planner.settings)
    if note:
        planner.note(note)
    planner.add_folders()
    if asked := planner.quarantine_keys(options.quarantine_on):
        planner.add_settings(asked)
    plan = planner.plan_
    services = systemd_services(options.ctl)
    plan.own |= {service.address: manager.ON for service in services}  # first: removed last
    texts = units.render_units(what)
    for name in sorted(texts, key=lambda name: (name in units.UNITS, name)):
        planner.add_own(make_unit_place(unit_file_path(options.etc, name)), texts[name])
    touched = {c.place.address[1] for c in plan.changes}
    for service in services:
        own = service_files(service, options.etc)
        stale = next((str(path) for path in own if str(path) in touched), "")
        planner.add(plan_service_start(service, own, stale))
    return plan


def service_files(service: manager.SystemdService, etc: Path) -> list[Path]:
    """Return the unit files of a service, then the modules it is made of."""
    packages = {"gpulock-exporter": ("gpulock", "gpulock_exporter")}
    modules = manager.package_files(*packages.get(service.name, ("gpulock",)))
    return [*(unit_file_path(etc, unit) for unit in service.units), *modules]


def make_unit_place(path: Path) -> FilePlace:
    """Return the place of one of the files."""
    if path.parent.name == "sysusers.d":
        return manager.SystemdFilePlace(
            path, program="systemd-sysusers", there=exporter_user_exists
        )
    if path.parent.name == "tmpfiles.d":
        return manager.SystemdFilePlace(
            path, program="systemd-tmpfiles --create", there=partial(tmpfiles_folders_exist, path)
        )
    return FilePlace(path)


def plan_service_start(
    service: manager.SystemdService, own: Sequence[Path], stale: str
) -> Iterable[Change]:
    """Yield the start of a service that is not on, or not what is installed; raise InstallError."""
    now = service.read()
    if now is not None and "masked" in now:
        raise InstallError(f"{service.title} is masked; systemctl unmask {' '.join(service.units)}")
    why = f"{stale} changes" if stale else ""
    if now == manager.ON and not why:
        why = service.restart_reason(own)
    if now != manager.ON or why:
        yield manager.ServiceStart(service, now, manager.ON, reason=why)


def exporter_user_exists() -> bool:
    """Say whether the exporter's user is there."""
    try:
        pwd.getpwnam(units.USER)
    except KeyError:
        return False
    return True


def tmpfiles_folders_exist(path: Path) -> bool:
    """Say whether the folders are there that a file for systemd-tmpfiles names."""
    rows = [line.split() for line in (FilePlace(path).read() or "").splitlines()]
    return all(Path(row[1]).is_dir() for row in rows if row[:1] == ["d"])


def check_exporter_python(python: str) -> None:
    """Raise InstallError for an interpreter that the exporter's own user cannot use."""
    if not Path(python).is_absolute():
        raise InstallError(f"interpreter {python} is no absolute path")
    for path in (Path(python), Path(python).resolve(), manager.package_files()[0]):
        if str(path).startswith(_HOMES):
            raise InstallError(
                f"{path} is below a home directory, which services do not see; {_DO}"
            )
    if why := why_users_cannot_run(Path(python)):
        raise InstallError(f"interpreter {why}; the exporter runs as {units.USER}; {_DO}")
    last = try_interpreter(python, ("-I", "-c", _NEEDED), _SECONDS)
    if last:
        raise InstallError(f"{python} cannot run the exporter as nobody ({last}); {_DO}")


class SystemdUninstaller(Uninstaller):
    """Both services: stopped first, then their files."""

    scheduler = "systemd"
    detached: ClassVar = frozenset(("service-before",))

    def __init__(
        self, config: Path, echo: Callable[[str], None], ctl: manager.Systemctl = manager.systemctl
    ) -> None:
        super().__init__(config, echo)
        self.ctl = ctl

    def detach(self) -> list[str]:
        """Stop and disable each service."""
        for address in reversed([*self.record.load()]):
            if address[0] == manager.SystemdService.kind:
                service = manager.SystemdService(address[1], address[2:], self.ctl)
                service.write(None)
                self.echo(f"stopped and disabled: {service.name}")
        return []

    def place(self, address: Address) -> Place:
        if address[0] == manager.SystemdService.kind:
            return manager.SystemdService(address[1], address[2:], self.ctl)
        if address[0] == manager.SystemdFilePlace.kind:
            return FilePlace(Path(address[1]))
        return super().place(address)

    def end(self) -> None:
        if exporter_user_exists():
            self.echo(f"user {units.USER} stays")
