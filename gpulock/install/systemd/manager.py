# SPDX-License-Identifier: Apache-2.0
"""systemd as the installer sees it: systemctl's answers, and the items that it keeps.

A program that runs may be older than its unit file or than the package it was started from: the
time tells that at which its process was started.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import gpulock
from gpulock.install.daemons import process_start_time
from gpulock.install.files import InstallError, run_program
from gpulock.install.items import FileItem, Item, Wanted

RUNNING: Final = Path("/run/systemd/system")  # sd_booted(3)
ON: Final = "enabled, active"
UNUSED: Final = (None, "disabled, inactive", "masked")
PACKAGE: Final = Path(gpulock.__file__)  # which each installation writes anew
_OFF: Final = 2.0  # seconds
_SECONDS: Final = 150.0  # more than a unit's TimeoutStartSec= and TimeoutStopSec=
_ASKED: Final = ("LoadState", "UnitFileState", "ActiveState", "MainPID", "NeedDaemonReload")

Systemctl = Callable[..., str]


def systemctl(*words: str) -> str:
    """Run systemctl and return what it prints; raise InstallError with its own words."""
    return run_systemd_program("systemctl", *words)


def run_systemd_program(*command: str) -> str:
    """Run one of systemd's programs; raise InstallError."""
    name = " ".join(command)
    try:
        done = run_program(command, _SECONDS, None)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InstallError(f"{name}: {fault}") from fault
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:400]
        raise InstallError(f"{name} ended with {done.returncode}: {said or 'no reason given'}")
    return done.stdout


def unit_properties(
    unit: str, names: Sequence[str] = (), ctl: Systemctl = systemctl
) -> dict[str, str]:
    """Return what systemd goes by for a unit, drop-ins and all; raise InstallError."""
    only = [f"--property={','.join(names)}"] if names else []
    found: dict[str, str] = {}
    for line in ctl("show", unit, *only).splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]} {value}" if found.get(name) else value
    return found


class UnitFile(FileItem):
    """A file of a unit's, whose folder goes with the last of them."""

    def tidy(self) -> None:
        super().tidy()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def absent(self) -> None:
        super().absent()
        self.tidy()


class ServiceItem(Item):
    """One program with its units, its socket before it: enabled, and started after its files.

    `sysusers` is the file of the users that it may run as.
    """

    def __init__(
        self,
        name: str,
        units: tuple[str, ...],
        files: Sequence[FileItem],
        sysusers: Path,
        ctl: Systemctl,
    ) -> None:
        self.name, self.units, self.sysusers, self.ctl = name, units, sysusers, ctl
        self.files = files
        self.needs = tuple(files)
        self.title = f"service {name}"

    def states(self) -> dict[str, str | None]:
        """Return each unit's state, None for one that systemd does not know."""
        return {u: unit_state(unit_properties(u, _ASKED, self.ctl)) for u in self.units}

    def read(self) -> str | None:
        """Return `enabled, active` where all its units are; None where systemd knows none."""
        states = self.states()
        if len({*states.values()}) == 1:
            return states[self.units[0]]
        return "; ".join(f"{unit}: {state or 'not there'}" for unit, state in states.items())

    def show(self, wanted: Wanted) -> list[str]:
        if wanted is Wanted.ABSENT:
            return [
                f"  - {u}: {state}" for u, state in self.states().items() if state not in UNUSED
            ]
        now = self.read()
        if now and "masked" in now:
            raise InstallError(f"it is masked; systemctl unmask {' '.join(self.units)}")
        if now != ON:
            return [*([f"  - {now}"] if now else []), f"  + {ON}"]
        stale = next((item.title for item in self.files if item.show(wanted)), "")
        why = f"{stale} changes" if stale else self.restart_reason()
        return [f"  started afresh: {why}"] if why else []

    def present(self) -> None:
        run_systemd_program("systemd-sysusers", str(self.sysusers))
        self.ctl("daemon-reload")
        self.ctl("enable", "--quiet", *self.units)
        journal = f"see journalctl -u {self.units[-1]}"
        try:
            self.ctl("restart", *self.units)
        except InstallError as fault:
            raise InstallError(f"{fault}; {journal}") from fault
        if (now := self.read()) != ON:
            raise InstallError(f"it is {now}; {journal}")

    def absent(self) -> None:
        there = [unit for unit, state in self.states().items() if state]
        self.ctl("disable", "--now", "--quiet", *there)
        if failed := [u for u, state in self.states().items() if state and "failed" in state]:
            self.ctl("reset-failed", *failed)  # else systemd keeps what it knows of it

    def restart_reason(self) -> str:
        """Return why what runs is not what is installed, or nothing; raise InstallError."""
        files = [*(item.path for item in self.files), PACKAGE]
        for unit in self.units:
            seen = unit_properties(unit, _ASKED, self.ctl)
            if seen.get("NeedDaemonReload") == "yes":
                return f"{unit} was changed since systemd read it"
            pid = int(seen.get("MainPID", "0") or "0")
            try:
                if pid and (changed := first_file_newer(files, process_start_time(pid))):
                    return f"{self.name} was started before {changed} was changed"
            except (OSError, ValueError):
                continue  # it ends at this moment
        return ""


class LoadedUnits(Item):
    """What systemd keeps of units whose files are gone; a service that starts has it read them."""

    title = "units as systemd has read them"

    def __init__(self, units: Sequence[str], ctl: Systemctl = systemctl) -> None:
        self.units, self.ctl = units, ctl

    def show(self, wanted: Wanted) -> list[str]:
        if wanted is Wanted.PRESENT:
            return []
        seen = {unit: unit_properties(unit, _ASKED, self.ctl) for unit in self.units}
        return [f"  {u}" for u, found in seen.items() if found.get("NeedDaemonReload") == "yes"]

    def absent(self) -> None:
        self.ctl("daemon-reload")


def unit_state(seen: dict[str, str]) -> str | None:
    """Return a unit's state in two words, None for one that is not there; pure."""
    if seen.get("LoadState") == "not-found":
        return None
    if seen.get("LoadState") == "masked" or seen.get("UnitFileState", "").startswith("masked"):
        return "masked"
    return f"{seen.get('UnitFileState') or 'disabled'}, {seen.get('ActiveState') or 'inactive'}"


def first_file_newer(files: Sequence[Path], when: float) -> Path | None:
    """Return the first file that was changed after a time (seconds of the epoch).

    What the kernel says of a process's start may be off by a second (btime is whole seconds). A
    file of a package has the time of its release: when it came here, its inode tells.
    """
    for path in files:
        try:
            info = path.stat()
            if max(info.st_mtime, info.st_ctime) > when + _OFF:
                return path
        except FileNotFoundError:
            continue
    return None
