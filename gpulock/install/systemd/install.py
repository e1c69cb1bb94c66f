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
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gpulock
from gpulock.daemon.core.own_program import is_package
from gpulock.install.files import InstallError, run_program
from gpulock.install.items import FileItem, Item, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.systemd import units
from gpulock.isolation.tree import MARK
from gpulock.store.locks import claims_root

ROOT: Final = Path("/")  # below which files go
BOOTED: Final = Path("/run/systemd/system")  # sd_booted(3)
DROP_IN: Final = "10-gpulock.conf"  # before those of `systemctl edit`, which win
PACKAGE: Final = Path(gpulock.__file__)
# What ProtectHome= and PrivateTmp= hide.
_HIDDEN: Final = ("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")
RESTART: Final = "systemctl restart gpulockd gpulock-exporter"
ON: Final = "enabled, active"
MASKED: Final = "masked"
UNUSED: Final = (None, "disabled, inactive", MASKED)
_ASKED: Final = "--property=LoadState,UnitFileState,ActiveState,ExecMainStatus"
_SECONDS: Final = 150.0  # more than a unit's TimeoutStartSec= and TimeoutStopSec=


def run_systemd_program(*command: str) -> str:
    """Run systemctl or another of systemd's programs; raise InstallError with its own words."""
    done = run_program(command, _SECONDS, None)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:400] or "no reason given"
        raise InstallError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout


def unit_properties(unit: str) -> dict[str, str]:
    """Return what systemd goes by for a unit; raise InstallError."""
    lines = run_systemd_program("systemctl", "show", unit, _ASKED).splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def unit_state(seen: Mapping[str, str]) -> str | None:
    """Return a unit's state in two words, None for one that is not there; pure."""
    if seen.get("LoadState") == "not-found":
        return None
    if seen.get("LoadState") == MASKED or seen.get("UnitFileState", "").startswith("masked"):
        return MASKED
    return f"{seen.get('UnitFileState') or 'disabled'}, {seen.get('ActiveState') or 'inactive'}"


def unit_states() -> dict[str, str]:
    """Return the state of each of our units that systemd knows; raise InstallError."""
    states = {unit: unit_state(unit_properties(unit)) for unit in units.UNITS}
    return {unit: state for unit, state in states.items() if state}


def unit_path(unit: str) -> Path:
    """Return where a unit's file is."""
    prefix = "usr/lib" if is_package() else "usr/local/lib"
    return ROOT / prefix / "systemd/system" / unit


def drop_in_path(unit: str) -> Path:
    """Return where a unit's drop-in is."""
    return ROOT / "etc/systemd/system" / f"{unit}.d" / DROP_IN


class UnitFile(FileItem):
    """A file of a unit's, whose folder goes with the last of them."""

    def write(self, wanted: Wanted) -> None:
        """Stop the services before: the next run starts them, even where this one is killed."""
        if wanted is Wanted.PRESENT and (known := unit_states()):
            run_systemd_program("systemctl", "stop", *known)
        super().write(wanted)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


class Services(Item):
    """Both programs, and the exporter's socket: enabled, and started after their files."""

    title = "services gpulockd and gpulock-exporter"

    def show(self, wanted: Wanted) -> list[str]:
        states = unit_states()
        if wanted is Wanted.ABSENT:
            return [f"  - {unit}: {state}" for unit, state in states.items() if state not in UNUSED]
        seen = {unit: states.get(unit, "not there") for unit in units.UNITS}
        return [f"  {unit}: {state} -> {ON}" for unit, state in seen.items() if state != ON]

    def write(self, wanted: Wanted) -> None:
        if wanted is Wanted.ABSENT:
            run_systemd_program("systemctl", "disable", "--now", "--quiet", *unit_states())
            if failed := [unit for unit, state in unit_states().items() if "failed" in state]:
                run_systemd_program("systemctl", "reset-failed", *failed)  # else it stays known
            return
        for program in (("systemd-sysusers",), ("systemd-tmpfiles", "--create")):
            run_systemd_program(*program, Path(units.SYSUSERS).name)
        run_systemd_program("systemctl", "daemon-reload")
        run_systemd_program("systemctl", "enable", "--quiet", *units.UNITS)
        try:
            run_systemd_program("systemctl", "restart", *units.UNITS)
        except InstallError as fault:
            raise InstallError(f"{fault}; see {units.JOURNAL}") from fault


class SystemdInstaller(NodePart):
    """Find out what is to be there on this node, and what is."""

    def __init__(self, config: Path) -> None:
        super().__init__(config.absolute(), "systemd")

    def parts(self) -> list[Item]:
        if self.settings.simulation:
            raise InstallError(
                f"{self.config_path} is a simulated node's, which has no services;"
                " leave out --config for those of this machine"
            )
        if not BOOTED.is_dir():
            raise InstallError(
                "systemd does not run here; start gpulockd and gpulock-exporter yourself"
            )
        for path in (Path(sys.executable), Path(sys.executable).resolve(), PACKAGE):
            if str(path).startswith(_HIDDEN):
                do = "install gpulock into a folder such as /opt/gpulock"
                raise InstallError(f"{path} is in a folder that services do not see; {do}")
        self.note(f"after an upgrade of gpulock, or a change of settings: {RESTART}")
        return self.items(self.drop_ins())

    def removal(self) -> list[Item]:
        return self.items(dict.fromkeys(units.UNITS, "any"))

    def drop_ins(self) -> dict[str, str]:
        """Return the drop-in of each unit; raise InstallError."""
        marked = Path(claims_root(self.settings.lock_dir), MARK).exists()
        return units.drop_in_texts(is_package(), self.config_path, self.settings, marked)

    def items(self, drop_ins: Mapping[str, str]) -> list[Item]:
        """Return the services after their files; of a package's own files none."""
        static = {} if is_package() else units.read_static_files()
        etc = (units.SYSUSERS, units.TMPFILES) if static else ()
        files = [FileItem(ROOT / "etc" / name, static[name]) for name in etc]
        files += [UnitFile(unit_path(unit), static[unit]) for unit in units.UNITS if static]
        files += [UnitFile(drop_in_path(unit), drop_ins[unit] or None) for unit in units.UNITS]
        return [*files, *([Services()] if BOOTED.is_dir() else [])]
