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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import gpulock
from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, Item, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.systemd import manager, units
from gpulock.install.systemd.manager import ASKED, MASKED, ON, UNUSED, unit_properties, unit_state
from gpulock.isolation.tree import MARK
from gpulock.node.settings import Settings
from gpulock.store.locks import claims_root

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
    """A file of a unit's, whose folder goes with the last of them; there is none without text."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        self.text = text or None

    def tidy(self) -> None:
        super().tidy()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def write(self, wanted: Wanted) -> None:
        super().write(wanted)
        self.tidy()


class Services(Item):
    """Both programs, and the exporter's socket: enabled, and started after their files."""

    title = "services gpulockd and gpulock-exporter"

    def __init__(self, files: Sequence[FileItem]) -> None:
        self.files = files

    def states(self) -> dict[str, str | None]:
        """Return each unit's state, None for one that systemd does not know."""
        return {unit: unit_state(unit_properties(unit, ASKED)) for unit in units.UNITS}

    def show(self, wanted: Wanted) -> list[str]:
        states = self.states()
        if wanted is Wanted.ABSENT:
            return [f"  - {unit}: {state}" for unit, state in states.items() if state not in UNUSED]
        if masked := [unit for unit, state in states.items() if state == MASKED]:
            raise InstallError(f"masked: systemctl unmask {' '.join(masked)}")
        if off := [unit for unit, state in states.items() if state != ON]:
            return [f"  {unit}: {states[unit] or 'not there'} -> {ON}" for unit in off]
        stale = [f"{item.title} changes" for item in self.files if item.show(wanted)]
        stale += [f"{unit} was changed since systemd read it" for unit in self.changed_units()]
        return [f"  started afresh: {stale[0]}"] if stale else []

    def write(self, wanted: Wanted) -> None:
        known = [unit for unit, state in self.states().items() if state]
        if wanted is Wanted.ABSENT:
            manager.systemctl("disable", "--now", "--quiet", *known)
            if failed := [unit for unit, state in self.states().items() if "failed" in str(state)]:
                manager.systemctl("reset-failed", *failed)  # else systemd keeps what it knows of it
            return
        for program in (("systemd-sysusers",), ("systemd-tmpfiles", "--create")):
            manager.run_systemd_program(*program, Path(units.SYSUSERS).name)
        if known:
            manager.systemctl("stop", *known)  # so that a run that is killed leaves it to the next
        manager.systemctl("daemon-reload")
        manager.systemctl("enable", "--quiet", *units.UNITS)
        journal = f"see {units.JOURNAL}"
        try:
            manager.systemctl("restart", *units.UNITS)
        except InstallError as fault:
            raise InstallError(f"{fault}; {journal}") from fault
        if off := [f"{unit} is {state}" for unit, state in self.states().items() if state != ON]:
            raise InstallError(f"{'; '.join(off)}; {journal}")

    def changed_units(self) -> Iterator[str]:
        """Yield each unit that systemd has to read again; raise InstallError.

        Of a drop-in in a folder that is new systemd 252 does not say so.
        """
        for unit in units.UNITS:
            seen, path = unit_properties(unit, ASKED), drop_in_path(unit)
            is_read = str(path) in seen.get("DropInPaths", "").split()
            if seen.get("NeedDaemonReload") == "yes" or is_read is not path.exists():
                yield unit


class SystemdInstaller(NodePart):
    """Find out what is to be there on this node, and what is."""

    def __init__(self, config: Path) -> None:
        super().__init__(config.absolute(), "systemd")

    def parts(self) -> list[Item]:
        check_own_node(self.settings)
        if not manager.RUNNING.is_dir():
            raise InstallError(
                "systemd does not run here; start gpulockd and gpulock-exporter yourself"
            )
        check_exporter_python(sys.executable)
        self.note(f"after an upgrade of gpulock, or a change of settings: {RESTART}")
        return self.items(self.drop_ins())

    def removal(self) -> list[Item]:
        return self.items(dict.fromkeys(units.UNITS, "any"))

    def drop_ins(self) -> dict[str, str]:
        """Return the drop-in of each unit; raise InstallError."""
        marked = Path(claims_root(self.settings.lock_dir), MARK).exists()
        return units.drop_in_texts(sys.executable, self.config_path, self.settings, marked)

    def items(self, drop_ins: Mapping[str, str]) -> list[Item]:
        """Return the services after their files; of a package's own files none."""
        static = {} if is_package() else units.read_static_files()
        etc = (units.SYSUSERS, units.TMPFILES) if static else ()
        files = [FileItem(ROOT / "etc" / name, static[name]) for name in etc]
        files += [UnitFile(unit_path(unit), static[unit]) for unit in units.UNITS if static]
        files += [UnitFile(drop_in_path(unit), drop_ins[unit]) for unit in units.UNITS]
        return [*files, *([Services(files)] if manager.RUNNING.is_dir() else [])]


def check_own_node(settings: Settings) -> None:
    """Raise InstallError for settings of a simulated node."""
    if settings.simulation:
        raise InstallError(f"{settings.path} is a simulated node's: its services are no system's")


def check_exporter_python(python: str) -> None:
    """Raise InstallError for an interpreter that the exporter's own user cannot use."""
    for path in (Path(python), Path(python).resolve(), PACKAGE):
        if str(path).startswith(_HIDDEN):
            raise InstallError(f"{path} is in a folder that services do not see; {_DO}")
