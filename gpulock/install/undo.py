# SPDX-License-Identifier: Apache-2.0
"""Take an installation back by its record; each scheduler adds its places and reasons to wait.

The hooks of both schedulers are one folder behind one link. The scheduler that is uninstalled
first gives the folder and the settings into the keeping of the other.
"""

from __future__ import annotations

import os
import syslog
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

from gpulock.errors import one_line
from gpulock.install.change import (
    LOCK,
    Change,
    FilePlace,
    FolderPlace,
    InstallRecord,
    Place,
    install_record,
    lock_installation,
)
from gpulock.install.docker import DaemonKey
from gpulock.install.hooks import InstallError
from gpulock.install.planner import (
    ENROOT_HOOK,
    ENROOT_HOOKS,
    PODMAN_HOOK,
    PODMAN_HOOKS,
    PODMAN_PROGRAM,
    current_settings,
)
from gpulock.install.versions import InstalledHooks

SHARING: Final = {"sge": ("slurm", "Slurm"), "slurm": ("sge", "Grid Engine")}
FORCE: Final = "--force --reason TEXT"
WAIT_OR_REAP: Final = "gpulock reap frees what dead jobs have left; wait for the others"
Address = tuple[str, ...]


class Uninstaller:
    """One installation that is taken back."""

    scheduler: ClassVar[str]

    def __init__(self, config: Path, echo: Callable[[str], None]) -> None:
        self.settings, self.given = current_settings(config)
        self.record = install_record(self.settings, self.scheduler)
        self.echo = echo

    def obstacles(self) -> Iterator[tuple[str, str]]:
        """Yield what speaks against it now, and what to do; --force passes over it."""
        yield from ()

    def place(self, address: Address) -> Place:
        """Return the place that an address of the record means; raise InstallError."""
        kind, *rest = address
        if kind == FilePlace.kind:
            return FilePlace(Path(rest[0]), int(rest[1], 8))
        if kind == DaemonKey.kind:
            return DaemonKey(Path(rest[0]), rest[1])
        if kind == InstalledHooks.kind:
            lock_dir = Path(self.settings.lock_dir)
            return InstalledHooks(Path(rest[0]), Path(rest[1]), rest[2], lock_dir)
        raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")

    def reason_to_keep(self, address: Address) -> str:
        """Return why a place must stay as it is for now, or nothing."""
        return ""

    def begin(self) -> None:
        """Do what comes before the first place."""

    def end(self) -> None:
        """Do what comes after the last place."""

    def undo(self, force: bool = False, reason: str = "") -> list[str]:
        """Put back what was there before; return what was left as it is, and why.

        Raises InstallError while something speaks against it; with `force` a reason is needed.
        """
        folder = self.record.path.parent
        if not folder.is_dir():
            return []
        with lock_installation(folder):
            left = self._undo_record(force, reason) if self.record.load() else []
            if not left and os.listdir(folder) == [LOCK]:  # also of an uninstallation cut short
                Path(self.settings.copy_path).unlink(missing_ok=True)
                (folder / LOCK).unlink()
                FolderPlace(folder).write(None)
        return left

    def _undo_record(self, force: bool, reason: str) -> list[str]:
        for what, do in self.obstacles():
            if not (force and reason):
                raise InstallError(f"{what}{do}")
            log_forced_uninstall(f"{self.scheduler} uninstalled by force: {what}: {reason}")
        if self.scheduler in SHARING:
            other, name = SHARING[self.scheduler]
            if transfer_shared_hooks(self.record, install_record(self.settings, other)):
                self.echo(f"the hooks and the settings stay: {name} uses them")
        if not self.record.load():
            return []
        self.begin()
        left = undo_recorded_changes(self.record, self.place, self.echo, self.reason_to_keep)
        self.end()
        return left


def undo_recorded_changes(
    record: InstallRecord,
    place_of: Callable[[Address], Place],
    echo: Callable[[str], None],
    why_not: Callable[[Address], str],
) -> list[str]:
    """Take back what the record says, newest first; return what was left, and why.

    `why_not` gives a reason to leave a place for a later try: something that is put back may still
    lead to it. It is tried again as long as anything else was put back meanwhile.
    """
    entries = record.load()
    left: list[str] = []
    waiting = list(reversed(entries))
    while waiting:
        kept: dict[Address, str] = {}
        for address in waiting:
            change = Change(place_of(address), *entries[address])
            try:
                if reason := why_not(address):
                    kept[address] = reason
                    continue
                why = change.undo()
            except InstallError as fault:
                left.append(str(fault))
                continue
            if why:
                left.append(why)
            else:
                echo(f"put back: {change.what}")
            del entries[address]
            record.save(entries)
        if len(kept) == len(waiting):
            return [*left, *kept.values()]
        waiting = list(kept)
    return left


def log_forced_uninstall(sentence: str) -> None:
    """Leave a line for the administrator."""
    syslog.openlog("gpulock", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, one_line(f"gpulock: {sentence}"))


def transfer_shared_hooks(giver: InstallRecord, taker: InstallRecord) -> bool:
    """Give hooks and settings into the keeping of another scheduler, if that is installed."""
    entries, kept = giver.load(), taker.load()
    if not kept:
        return False
    config = {address[2] for address in (*entries, *kept) if address[0] == InstalledHooks.kind}
    podman = [str(PODMAN_HOOKS / name) for name in (PODMAN_HOOK, PODMAN_PROGRAM)]
    files = {*config, str(ENROOT_HOOKS / ENROOT_HOOK), *podman}
    shared = [
        address
        for address in entries
        if address[0] in (InstalledHooks.kind, DaemonKey.kind)
        or (address[0] == "file" and address[1] in files)
    ]
    result = dict(kept)
    for address in shared:
        before, after = entries.pop(address)
        if address in kept:
            result[address] = merge_recorded_changes((before, after), kept[address])
        else:  # first, so that it is taken back last
            result = {address: (before, after), **result}
    if shared:
        taker.save(result)
        giver.save(entries)
    return True


def merge_recorded_changes(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> tuple[str | None, str | None]:
    """Return the one change that two records of a place amount to; pure."""
    if one[1] == other[0]:
        return (one[0], other[1])
    if other[1] == one[0]:
        return (other[0], one[1])
    return (None if None in (one[0], other[0]) else other[0], other[1])
