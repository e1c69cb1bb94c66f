# SPDX-License-Identifier: Apache-2.0
"""Remove gpulock's own files from a node; what is in other programs' files is named, not touched.

No earlier value is put back. A hook stays while its scheduler leads to it, for a job that finds
none fails: what leads there is named, and a second run completes the uninstallation. The hooks of
both schedulers are one folder: the scheduler that is uninstalled first leaves it to the other.
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
    Address,
    FilePlace,
    FolderPlace,
    Place,
    install_record,
    lock_installation,
)
from gpulock.install.container_hooks import container_items
from gpulock.install.hooks import InstallError
from gpulock.install.installed import find_slurm_installation
from gpulock.install.items import ItemRun, Wanted
from gpulock.install.node_part import current_settings
from gpulock.install.versions import InstalledHooks

FORCE: Final = "--force --reason TEXT"
WAIT_OR_REAP: Final = "gpulock reap frees what dead jobs have left; wait for the others"


class Uninstaller:
    """One installation that is removed."""

    scheduler: ClassVar[str]
    # Kinds of places that `detach` sees to, or that are the site's (in records of older versions).
    detached: ClassVar[frozenset[str]] = frozenset()

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
        if kind == InstalledHooks.kind:
            lock_dir = Path(self.settings.lock_dir)
            return InstalledHooks(Path(rest[0]), Path(rest[1]), rest[2], lock_dir)
        raise InstallError(f"a place of kind {kind} is not known; use the gpulock that made it")

    def detach(self) -> list[str]:
        """Have nothing lead to gpulock's files any more; return what still does."""
        return []

    def reason_to_keep(self, address: Address) -> str:
        """Return why a place must stay as it is for now, or nothing."""
        return ""

    def end(self) -> None:
        """Say what stays, once all of gpulock's own is gone."""

    def uninstall(self, force: bool = False, reason: str = "") -> list[str]:
        """Remove what is gpulock's own; return what stays for now, and what to do about it.

        Raises InstallError while something speaks against it; with `force` a reason is needed.
        """
        folder = self.record.path.parent
        if not folder.is_dir():
            return []
        with lock_installation(folder):
            FilePlace(Path(self.settings.path)).discard_leftovers()
            left = self._remove_recorded(force, reason) if self.record.load() else []
            if not left and os.listdir(folder) == [LOCK]:  # also of an uninstallation cut short
                Path(self.settings.copy_path).unlink(missing_ok=True)
                (folder / LOCK).unlink()
                FolderPlace(folder).write(None)
        return left

    def _remove_recorded(self, force: bool, reason: str) -> list[str]:
        for what, do in self.obstacles():
            if not (force and reason):
                raise InstallError(f"{what}{do}")
            log_forced_uninstall(f"{self.scheduler} uninstalled by force: {what}: {reason}")
        if left := self.detach():
            return left
        entries = self.record.load()
        has_slurm = find_slurm_installation(self.settings) is not None
        if has_slurm:
            self.echo("the hooks stay: Slurm uses them")
        else:
            ItemRun(container_items(), Wanted.ABSENT, self.echo, dry_run=False).run()
        for address in reversed([*entries]):
            kept = has_slurm and address[0] == InstalledHooks.kind
            try:
                why = "" if kept else self._remove_place(address, entries[address])
            except InstallError as fault:
                why = str(fault)
            if why:
                left.append(why)
            else:
                del entries[address]
                self.record.save(entries)
        if not left:
            self.end()
            self.echo(f"{self.settings.path}, locks and history stay")
        return left

    def _remove_place(self, address: Address, value: str | None) -> str:
        """Remove one place; return why it stays, or nothing; raise InstallError."""
        if address[0] in self.detached or address[1] == self.settings.path:
            return ""
        if why := self.reason_to_keep(address):
            return why
        place = self.place(address)
        place.discard_leftovers()
        if isinstance(place, FilePlace):
            now = place.read()
            own = Path(self.settings.state_dir) in place.path.parents
            if now not in (None, value) and not own:
                return f"{place.title} was changed since gpulock wrote it: rm {place.path}"
        place.write(None)
        self.echo(f"removed: {place.title}")
        return ""


def log_forced_uninstall(sentence: str) -> None:
    """Leave a line for the administrator."""
    syslog.openlog("gpulock", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, one_line(f"gpulock: {sentence}"))
