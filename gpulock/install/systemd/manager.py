# SPDX-License-Identifier: Apache-2.0
"""systemd as the installer sees it: systemctl's answers, and units as places that hold a state.

A program that runs may be older than its unit file or than the package it was started from:
`Unit.aged` tells that, by the time its process was started.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.install.change import Change, FilePlace, Place
from gpulock.install.daemons import process_start_time
from gpulock.install.hooks import InstallError, run_program

RUNNING: Final = Path("/run/systemd/system")  # sd_booted(3)
ON: Final = "enabled, active"
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


@dataclass(frozen=True)
class SystemdService(Place):
    """One program with its units (its socket before it): a place whose value is their state."""

    name: str
    units: tuple[str, ...]
    ctl: Systemctl = field(default=systemctl, compare=False)
    kind, named = "service", "service {name}"

    @property
    def address(self) -> tuple[str, ...]:
        return (self.kind, self.name, *self.units)

    def read(self) -> str | None:
        """Return `enabled, active` where all its units are; None where systemd knows none."""
        states = [unit_state(unit_properties(unit, _ASKED, self.ctl)) for unit in self.units]
        if not any(states):
            return None
        odd = [f"{u}: {s or 'not there'}" for u, s in zip(self.units, states)]
        return states[0] if len({*states}) == 1 else "; ".join(odd)

    def write(self, value: str | None) -> None:
        self.ctl("daemon-reload")
        if value == ON:
            self.ctl("enable", "--quiet", *self.units)
            try:
                self.ctl("restart", *self.units)
            except InstallError as fault:
                raise InstallError(f"{fault}; see journalctl -u {self.units[-1]}") from fault
        elif self.read() is not None:
            self.ctl("disable", "--now", "--quiet", *self.units)

    def restart_reason(self, files: Sequence[Path]) -> str:
        """Return why what runs is not what is installed, or nothing; raise InstallError."""
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


_COLD: Final = ("cli", "install", "report", "simulate", "share", "text")


def package_files(*packages: str) -> list[Path]:
    """Return the modules of packages (gpulock's own by default), as far as services load them."""
    found: list[Path] = []
    for name in packages or ("gpulock",):
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
        found += [
            path
            for path in sorted(folder.rglob("*.py"))
            if path.relative_to(folder).parts[0] not in _COLD
        ]
    return found


@dataclass(frozen=True)
class ServiceStart(Change):
    """A service that is enabled and started afresh, for a reason; it may seem to be so already."""

    reason: str = ""

    def apply(self) -> None:
        """Enable and start it; raise InstallError where it does not stay up."""
        self.place.write(self.after)
        if (now := self.place.read()) != self.after:
            raise InstallError(f"{self.what} is {now}, see journalctl -u {self.place.address[1]}")

    def lines(self) -> list[str]:
        """Return what is done and why."""
        if self.before == self.after:
            return [f"{self.what}: started afresh", f"  ({self.reason})"]
        return super().lines()


@dataclass(frozen=True)
class SystemdFilePlace(FilePlace):
    """A file that one of systemd's programs makes things from at once: users, folders."""

    program: str = ""
    there: Callable[[], bool] = field(default=lambda: True, compare=False)
    kind = "made"

    @property
    def address(self) -> tuple[str, ...]:
        return (self.kind, str(self.path), self.program)

    def read(self) -> str | None:
        """Return the text, marked where what it makes is not there."""
        text = super().read()
        return text if text is None or self.there() else f"{text}# (not there yet)\n"

    def write(self, value: str | None) -> None:
        """Replace the file and let things be made; what was made stays when it is removed."""
        super().write(value)
        if value is not None:
            run_systemd_program(*self.program.split(), str(self.path))
