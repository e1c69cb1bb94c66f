# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`: gpulockd and the exporter as services.

A package has the units, and the administrator's settings make one drop-in of each. Another
installation puts its units below /usr/local. Locks are none of systemd's: they outlive every start,
stop and upgrade of a service, and stay with history when services go. So does the exporter's user:
a user's number that is given away again could own files of the one before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import gpulock
from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, InstallParts, Item, Wanted, difference_lines
from gpulock.install.node_part import NodePart
from gpulock.install.systemd import manager, units
from gpulock.install.systemd.manager import ASKED, ON, UNUSED, unit_properties, unit_state
from gpulock.install.trial import why_users_cannot_run
from gpulock.isolation.tree import MARK
from gpulock.store.locks import claims_root

SERVICES: Final = {"gpulock-exporter": (units.SOCKET, units.EXPORTER), "gpulockd": (units.DAEMON,)}
ROOT: Final = Path("/")  # below which files go
DROP_IN: Final = "10-gpulock.conf"  # before those of `systemctl edit`, which win
PACKAGE: Final = Path(gpulock.__file__)
# What ProtectHome= and PrivateTmp= hide.
_HIDDEN: Final = ("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")
RESTART: Final = "systemctl restart gpulockd gpulock-exporter"
_DO: Final = "install gpulock into a folder such as /opt/gpulock"


def is_package() -> bool:
    """Say whether this gpulock is a distribution's package, which has the units."""
    return sys.executable == units.PACKAGE_PYTHON


def unit_path(unit: str) -> Path:
    """Return where a unit's file is."""
    prefix = "usr/lib" if is_package() else "usr/local/lib"
    return ROOT / prefix / "systemd/system" / unit


def drop_in_path(unit: str) -> Path:
    """Return where a unit's drop-in is."""
    return ROOT / "etc/systemd/system" / f"{unit}.d" / DROP_IN


class UnitFile(FileItem):
    """A file of a unit's, whose folder goes with the last of them."""

    def tidy(self) -> None:
        super().tidy()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def write(self, wanted: Wanted) -> None:
        super().write(wanted)
        self.tidy()


class ServiceItem(Item):
    """One program with its units, its socket before it: enabled, and started after its files."""

    def __init__(self, name: str, files: Sequence[FileItem], all_: list[ServiceItem]) -> None:
        self.name, self.units, self.all = name, SERVICES[name], all_
        self.files = files
        self.title = f"service {name}"

    def states(self) -> dict[str, str | None]:
        """Return each unit's state, None for one that systemd does not know."""
        return {unit: unit_state(unit_properties(unit, ASKED)) for unit in self.units}

    def read(self) -> str | None:
        """Return `enabled, active` where all its units are; None where systemd knows none."""
        states = self.states()
        if len({*states.values()}) == 1:
            return states[self.units[0]]
        return "; ".join(f"{unit}: {state or 'not there'}" for unit, state in states.items())

    def show(self, wanted: Wanted) -> list[str]:
        if wanted is Wanted.ABSENT:
            states = self.states().items()
            return [f"  - {unit}: {state}" for unit, state in states if state not in UNUSED]
        now = self.read()
        if now and "masked" in now:
            raise InstallError(f"it is masked; systemctl unmask {' '.join(self.units)}")
        if now != ON:
            return difference_lines(now, ON)
        stale = next((item.title for item in self.files if item.show(wanted)), "")
        why = f"{stale} changes" if stale else self.changed_unit()
        return [f"  started afresh: {why}"] if why else []

    def write(self, wanted: Wanted) -> None:
        if wanted is Wanted.ABSENT:
            states = {unit: state for unit, state in self.states().items() if state}
            manager.systemctl("disable", "--now", "--quiet", *states)
            if failed := [unit for unit, state in self.states().items() if "failed" in str(state)]:
                manager.systemctl("reset-failed", *failed)  # else systemd keeps what it knows of it
            return
        for program in (("systemd-sysusers",), ("systemd-tmpfiles", "--create")):
            manager.run_systemd_program(*program, Path(units.SYSUSERS).name)
        # the reload hides that another was changed, too: it is started afresh with this one
        others = [one for one in self.all if one.read() == ON and one.changed_unit()]
        services = [self, *(one for one in others if one is not self)]
        names = [unit for one in services for unit in one.units]
        if old := [u for one in services for u, state in one.states().items() if state]:
            manager.systemctl("stop", *old)  # so that a run that is killed leaves it to the next
        manager.systemctl("daemon-reload")
        manager.systemctl("enable", "--quiet", *names)
        journal = f"see journalctl -u {self.units[-1]}"
        try:
            manager.systemctl("restart", *names)
        except InstallError as fault:
            raise InstallError(f"{fault}; {journal}") from fault
        if (now := self.read()) != ON:
            raise InstallError(f"it is {now}; {journal}")

    def changed_unit(self) -> str:
        """Return which unit systemd has to read again, or nothing; raise InstallError.

        Of a drop-in in a folder that is new systemd 252 does not say so.
        """
        for unit in self.units:
            seen, path = unit_properties(unit, ASKED), drop_in_path(unit)
            is_read = str(path) in seen.get("DropInPaths", "").split()
            if seen.get("NeedDaemonReload") == "yes" or is_read is not path.exists():
                return f"{unit} was changed since systemd read it"
        return ""


class SystemdInstaller(NodePart):
    """Find out what is to be there on this node, and what is."""

    def __init__(self, config: Path) -> None:
        super().__init__(config.absolute(), "systemd")
        self.static = {} if is_package() else units.read_static_files()

    def parts(self) -> InstallParts:
        """Return all items; raise InstallError for what cannot be installed here."""
        if self.settings.simulation:
            raise InstallError(
                f"{self.config_path} is a simulated node's: its services are no system's"
            )
        if not manager.RUNNING.is_dir():
            raise InstallError(
                "systemd does not run here; start gpulockd and gpulock-exporter yourself"
            )
        check_exporter_python(sys.executable)
        self.note(f"after an upgrade of gpulock, or a change of settings: {RESTART}")
        return InstallParts(self.items(self.services()), self.notes)

    def removal(self) -> InstallParts:
        """Return the items of which the last goes first: a service before its files."""
        services = self.services(dict.fromkeys(units.UNITS, "any"))
        return InstallParts(self.items(services), self.notes)

    def items(self, services: Sequence[ServiceItem]) -> list[Item]:
        """Return services and files, of which those of a service come before it."""
        files = [item for one in services for item in one.files]
        return [*self.etc_files(), *files, *(services if manager.RUNNING.is_dir() else ())]

    def etc_files(self) -> list[FileItem]:
        """Return what is ours in /etc; of a package's own nothing."""
        names = (units.SYSUSERS, units.TMPFILES) if self.static else ()
        return [FileItem(ROOT / "etc" / name, self.static[name]) for name in names]

    def services(self, drop_ins: Mapping[str, str] | None = None) -> list[ServiceItem]:
        """Return the services with their files, in the order in which they are started.

        Of each unit that is it, but of a package's, and its drop-in. Raises InstallError.
        """
        if drop_ins is None:
            marked = Path(claims_root(self.settings.lock_dir), MARK).exists()
            python, config = sys.executable, self.config_path
            drop_ins = units.drop_in_texts(python, config, self.settings, marked)
        found: list[ServiceItem] = []
        for name, own in SERVICES.items():
            static = {unit_path(unit): self.static[unit] for unit in own if self.static}
            texts = static | {drop_in_path(unit): drop_ins[unit] for unit in own}
            found.append(ServiceItem(name, [UnitFile(*one) for one in texts.items()], found))
        return found


def check_exporter_python(python: str) -> None:
    """Raise InstallError for an interpreter that the exporter's own user cannot use."""
    for path in (Path(python), Path(python).resolve(), PACKAGE):
        if str(path).startswith(_HIDDEN):
            raise InstallError(f"{path} is in a folder that services do not see; {_DO}")
    if why := why_users_cannot_run(Path(python)):
        raise InstallError(f"interpreter {why}; the exporter runs as {units.USER}; {_DO}")
