# SPDX-License-Identifier: Apache-2.0
"""Places that hold one value: a file, a folder; what differs is shown as lines; one installer.

Nothing earlier is kept, and so nothing is ever put back over what an administrator wrote since.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from filelock import FileLock, Timeout

from gpulock.install.hooks import InstallError, make_public_folder, remove_file_durably
from gpulock.store import atomic

LOCK: Final = "lock"  # beside the records
_UNRENAMED: Final = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{12}")  # see gpulock.store.atomic
_SHOWN: Final = 12  # lines: a longer text (a script of ours) is only counted


class Place:
    """Where one value is: read and written whole; None is "not there"; people see its title."""

    named: ClassVar[str]  # the title, with names of fields in braces

    @property
    def title(self) -> str:
        """Name the place for people."""
        return self.named.format_map(vars(self))

    def read(self) -> str | None:
        """Return the value now; raise InstallError where it cannot be found out."""
        raise NotImplementedError

    def write(self, value: str | None) -> None:
        """Set or take away the value; raise InstallError."""
        raise NotImplementedError

    def discard_leftovers(self) -> None:
        """Remove what a write that was killed has left; raise InstallError."""


def difference_lines(before: str | None, after: str | None) -> list[str]:
    """Return the lines that go, with `-`, and those that come, with `+`; pure."""
    gone, come = _lines_only_in(before, after), _lines_only_in(after, before)
    return [*(f"  - {line}" for line in gone), *(f"  + {line}" for line in come)]


def _lines_only_in(value: str | None, other: str | None) -> list[str]:
    """Return the lines that one value has and the other has not; of many their number."""
    known = (other or "").splitlines()
    lines = [line for line in (value or "").splitlines() if line.strip() and line not in known]
    return lines if len(lines) <= _SHOWN else [f"({len(lines)} lines)"]


# --- places on this node's own disk -----------------------------------------------------------


@dataclass(frozen=True)
class FilePlace(Place):
    """A text file, replaced whole."""

    path: Path
    mode: int = 0o644
    named = "file {path}"

    def read(self) -> str | None:
        try:
            return atomic.read_text(str(self.path))
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; look at it") from fault

    def write(self, value: str | None) -> None:
        try:
            if value is None:
                remove_file_durably(self.path)
                return
            make_public_folder(self.path.parent)
            data = value.encode("utf-8", "surrogateescape")
            mode, owner = self.mode_and_owner()
            atomic.replace_file(str(self.path), data, mode, owner=owner, durable=True)
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; are you root?") from fault

    def mode_and_owner(self) -> tuple[int, tuple[int, int] | None]:
        """Return what a new file gets: its mode, and (uid, gid) where these are not the caller's.

        Raises OSError.
        """
        return self.mode, None

    def discard_leftovers(self) -> None:
        discard_unrenamed(self.path.parent, self.path.name)


class OthersFile(FilePlace):
    """A text file of another program's, which keeps the mode and owner that it has."""

    def mode_and_owner(self) -> tuple[int, tuple[int, int] | None]:
        try:
            had = self.path.stat()
        except FileNotFoundError:
            return super().mode_and_owner()
        return stat.S_IMODE(had.st_mode), (had.st_uid, had.st_gid)


def discard_unrenamed(folder: Path, name: str = "") -> None:
    """Remove what a killed `replace_file` of a name (any: of all) left; raise InstallError.

    Nobody else writes there now: installers have one lock.
    """
    try:
        for path in folder.iterdir():
            found = _UNRENAMED.fullmatch(path.name)
            if found and name in ("", found[1]):
                path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as fault:
        raise InstallError(f"{fault.filename}: {fault.strerror}; are you root?") from fault


@dataclass(frozen=True)
class FolderPlace(Place):
    """A folder; its value is its mode."""

    path: Path
    named = "folder {path}"

    def read(self) -> str | None:
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; look at it") from fault
        if not stat.S_ISDIR(info.st_mode):
            raise InstallError(f"{self.path} is no folder; move it away")
        return f"uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}"

    def write(self, value: str | None) -> None:
        try:
            if value is None:
                if not any(self.path.iterdir()):
                    self.path.rmdir()
                    atomic.fsync_path(f"{self.path.parent}/.")
                return
            make_public_folder(self.path)
            os.chown(self.path, os.geteuid(), os.getegid())
            self.path.chmod(0o755)
            atomic.fsync_path(f"{self.path}/.")
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; are you root?") from fault


@contextmanager
def lock_installation(folder: Path) -> Generator[None, None, None]:
    """Let one process at a time change the installation whose records are in a folder.

    Raises InstallError where another does so now. No user can open the file, and so block us.
    """
    path = folder / LOCK
    lock = FileLock(str(path), timeout=0, mode=0o600)
    try:
        make_public_folder(folder)
        lock.acquire()
    except Timeout as busy:
        raise InstallError(
            f"gpulock install or uninstall runs already (fuser -v {path}); wait until it ends"
        ) from busy
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; are you root?") from fault
    try:
        discard_unrenamed(folder)
        yield
    finally:
        lock.release()
