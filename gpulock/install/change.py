# SPDX-License-Identifier: Apache-2.0
"""One change to a node or cluster: shown before it is made, compared before it is written.

A change is a place (a file, a queue's attribute) and its value before and after. What is gpulock's
own on this node is noted in STATE_DIR/install before it is made, with the value that gpulock gave
it. No earlier value is kept: nothing is ever put back over what an administrator wrote since. A
power cut changes no order: each step is on disk before the next.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Optional

from gpulock.daemon.core.instance_lock import private_file_lock
from gpulock.errors import Refusal
from gpulock.install.hooks import InstallError, make_public_folder, remove_file_durably
from gpulock.node.settings import Settings
from gpulock.store import atomic

VERSION: Final = 1
LOCK: Final = "lock"  # beside the records
_UNRENAMED: Final = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{12}")  # see gpulock.store.atomic
_SHOWN: Final = 12  # lines: a longer text (a script of ours) is only counted


class Place:
    """Where one value is: read and written whole; None is "not there".

    The record keeps its kind and the fields named in `coordinates`; people see its title.
    """

    kind: ClassVar[str]
    coordinates: ClassVar[tuple[str, ...]]
    named: ClassVar[str]  # the title, with names of fields in braces

    @property
    def address(self) -> tuple[str, ...]:
        """Kind and coordinates, as the record keeps them."""
        return (self.kind, *(str(getattr(self, name)) for name in self.coordinates))

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


@dataclass(frozen=True)
class Change:
    """What becomes of one place; `first` is done before, and raises InstallError against it."""

    place: Place
    before: str | None
    after: str | None
    first: Callable[[Callable[[str], None]], None] | None = field(default=None, compare=False)

    @property
    def what(self) -> str:
        """Name what changes."""
        return self.place.title

    def apply(self) -> None:
        """Make the change, unless the place no longer holds what was shown; raise InstallError."""
        self.place.discard_leftovers()
        if self.place.read() != self.before:
            raise InstallError(f"{self.what} was changed meanwhile; run it again")
        self.place.write(self.after)
        if self.place.read() != self.after:
            raise InstallError(f"{self.what} does not hold what was written; look at it")

    def lines(self) -> list[str]:
        """Return the change as it is shown: a title, then what goes and what comes."""
        gone = _lines_only_in(self.before, self.after)
        come = _lines_only_in(self.after, self.before)
        return [self.what, *(f"  - {line}" for line in gone), *(f"  + {line}" for line in come)]


def _lines_only_in(value: str | None, other: str | None) -> list[str]:
    """Return the lines that one value has and the other has not; of many their number."""
    known = (other or "").splitlines()
    lines = [line for line in (value or "").splitlines() if line.strip() and line not in known]
    return lines if len(lines) <= _SHOWN else [f"({len(lines)} lines)"]


def plan_place_change(place: Place, after: str | None) -> Iterable[Change]:
    """Yield the change that gives a place its new value, if it has another one."""
    before = place.read()
    if before != after:
        yield Change(place, before, after)


# --- places on this node's own disk -----------------------------------------------------------


@dataclass(frozen=True)
class FilePlace(Place):
    """A text file, replaced whole."""

    path: Path
    mode: int = 0o644
    kind = "file"
    named = "file {path}"

    @property
    def address(self) -> tuple[str, ...]:
        return (self.kind, str(self.path), f"{self.mode:o}")

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
    kind, coordinates, named = "folder", ("path",), "folder {path}"

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


# --- the record of what is gpulock's own -------------------------------------------------------

Address = tuple[str, ...]
Entries = dict[Address, Optional[str]]  # the value that gpulock gave a place, by address


class InstallRecord:
    """What is gpulock's own on this node, in one file, in the order in which it was made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Entries:
        """Return the values by address; raise InstallError."""
        text = FilePlace(self.path).read()
        if text is None:
            return {}
        try:
            data: Any = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}")
            return {tuple(one["place"]): one["after"] for one in data["changes"]}
        except (ValueError, KeyError, TypeError) as fault:
            raise InstallError(f"{self.path} is not understood ({fault}); move it away") from fault

    def save(self, entries: Entries) -> None:
        """Write the record, or remove it when there is nothing in it."""
        own = [  # an older gpulock, to which somebody went back, finds nothing to put back
            {"place": list(place), "before": None, "after": value}
            for place, value in entries.items()
        ]
        data = {"version": VERSION, "changes": own}
        FilePlace(self.path, 0o600).write(json.dumps(data, indent=1) + "\n" if own else None)

    def note(self, own: Entries) -> None:
        """Note places that are about to be written, or hold what they should already."""
        entries = self.load()
        if own.items() - entries.items():
            self.save({**entries, **own})


def install_record(settings: Settings, scheduler: str) -> InstallRecord:
    """Return where it is noted what was installed for `sge`, `slurm` or `systemd`."""
    return InstallRecord(Path(settings.state_dir, "install", f"{scheduler}.json"))


@contextmanager
def lock_installation(folder: Path) -> Generator[None, None, None]:
    """Let one process at a time change the installation whose records are in a folder.

    Raises InstallError that names the process which does so now.
    """
    path = folder / LOCK
    lock = private_file_lock(str(path), 0.0)
    try:
        make_public_folder(folder)
        lock.acquire()  # pyright: ignore[reportUnknownMemberType] (its types are of 3.11)
        path.write_text(f"{os.getpid()}\n")
    except TimeoutError as busy:
        holder = (FilePlace(path).read() or "").strip() or "unknown"
        raise InstallError(
            f"gpulock install or uninstall runs already, as process {holder}; wait until it ends"
        ) from busy
    except Refusal as fault:
        raise InstallError(f"{fault.why}; {fault.do}") from fault
    except OSError as fault:
        lock.release()
        raise InstallError(f"{path}: {fault.strerror}; are you root?") from fault
    try:
        discard_unrenamed(folder)
        yield
    finally:
        lock.release()


def apply_changes(
    changes: Sequence[Change],
    record: InstallRecord,
    echo: Callable[[str], None],
    own: Entries | None = None,
) -> None:
    """Note what is gpulock's own, then make the changes in order; raise InstallError.

    Without `own` all the places that change are.
    The first change that fails ends it. Nothing is taken back then: run it again, or `uninstall`.
    """
    with lock_installation(record.path.parent):
        record.note({c.place.address: c.after for c in changes} if own is None else own)
        for change in changes:
            if change.first:
                change.first(echo)
            change.apply()
            echo(f"done: {change.what}")
