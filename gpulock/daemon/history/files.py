# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/history: its one author, the file of JSON lines that grows, and the rotated ones.

Warm. A line is written whole or taken back. The file is opened anew for each batch, so that
logrotate may rename it at any time and nobody needs a signal.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, ClassVar, Final

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.instance_lock import private_file_lock
from gpulock.daemon.history import pending
from gpulock.daemon.history.pending import EndedClaims
from gpulock.daemon.history.record import (
    ExporterSamples,
    build_history_record,
    encode_history_record,
    is_whole_record,
)
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import ROUND, Chore, Due
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import atomic, grants, owed
from gpulock.store.counters import read_history_dropped
from gpulock.store.verdicts import PERIOD

FOLDER: Final = "history"
NAME: Final = "history.jsonl"
PACKED: Final = ".gz"
LINE_LIMIT: Final = 1 << 20  # bytes; 128 instances with their buckets are 0.1 MB
CHUNK: Final = 1 << 16  # bytes: of larger ones the allocator asks the kernel each time
DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile)  # of a compressed file
LOCK_SECONDS: Final = 5.0  # for another author to finish
BATCH: Final = 64  # claims that are made durable at once
DAY: Final = 86400.0  # seconds that the clock may have been set back by
TOKEN: Final = re.compile(rb'"token":"([0-9A-Za-z]{1,64})"')
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HistoryWriter(Chore):
    """The one author of the history, after each reconcile: gpulockd, or `gpulock reap` without it.

    A line is made durable before the finished claims go, and one that is found there again is
    looked for in the history first. So a crash at any instruction loses no claim and writes none
    twice; a claim that cannot be written waits. `say` is told each fault once while it lasts.
    """

    after: ClassVar[Due] = {ROUND: ()}

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._left: set[str] = set()  # written, and not yet gone from `finished/`
        self._sought: set[str] = set()  # of those without a note, looked for in that history
        self._file = (0, 0)  # the history as this process left it
        self._saw = -PERIOD  # when it was noted last which claims stand
        self.written = 0  # lines, by the last run

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write what is over; `now` is CLOCK_BOOTTIME in seconds."""
        faults: set[str] = set()
        self.written = 0
        left = [one.lock.owner for one in report.outcomes if one.act != FREED]
        standing = {record.token: record for record in left if record}
        if now - self._saw >= PERIOD:
            here = [one for one in standing.values() if one.boot_id == node.boot_id]
            pending.touch_last_seen(node.settings.state_dir, here, time.time(), clock_boottime())
            self._saw = now
        try:
            found = pending.read_finished_claims(node.store, faults)
            known = found.keys() | standing.keys()
            folder = f"{node.settings.state_dir}/{owed.FOLDER}"
            kept = sorted(os.listdir(folder)) if os.path.lexists(folder) else []
            if lost := [name for name in kept if name not in known and name[0] != "."]:
                found |= pending.find_lost_claims(node, lost, faults, time.time())
            if found:
                devices = {device.id: device for device in report.devices}
                self.written = self._write(node, found, devices, faults)
        except (OSError, Refusal) as failed:
            why = failed.why if isinstance(failed, Refusal) else str(failed)
            faults.add(f"the history of finished claims waits in {node.store.finished_dir}: {why}")
        if dropped := read_history_dropped(node.store):
            cap = grants.FINISHED_CAP
            faults.add(
                f"the history lacks {dropped} claims of this boot: "
                f"more than {cap} finished ones waited for it"
            )
        for fault in sorted(faults - self._said):
            self._say(fault)
        self._said = faults

    def _write(
        self, node: Node, found: EndedClaims, devices: Mapping[str, Device], faults: set[str]
    ) -> int:
        """Write the claims that need wait for nothing more; return how many lines."""
        advice = ExporterSamples(node.settings.exporter_dir)
        ready: EndedClaims = {}
        ends: dict[str, float] = {}  # when the last device was released
        now = time.time()
        for token, parts in found.items():
            last = max(parts.values(), key=lambda part: part.at)
            if not advice.may_come(token, last.owner.boot_id, last.at, now):
                noted = all([part.noted for part in parts.values()])
                ready[token] = parts if noted else pending.correct_reboot_ends(node, parts, now)
                ends[token] = max([part.at for part in ready[token].values()])
        if not ready:
            return 0
        folder = f"{node.settings.state_dir}/{FOLDER}"
        path = f"{folder}/{NAME}"
        os.makedirs(folder, 0o755, exist_ok=True)  # a site may set its mode, or have a link there
        count = 0
        with private_file_lock(f"{folder}/gate", LOCK_SECONDS):
            done = self._find_written_claims(folder, path, ready, ends)
            if done:
                pending.remove_written_claims(node, done)
            new = sorted(set(ready) - done, key=lambda token: (ends[token], token))
            for begin in range(0, len(new), BATCH):
                lines: dict[str, bytes] = {}
                for token in new[begin : begin + BATCH]:
                    try:
                        claim = build_history_record(list(ready[token].values()), advice, devices)
                        lines[token] = encode_history_record(claim)
                    except (ValueError, OverflowError) as fault:
                        faults.add(f"claim {token} has no line: {fault}; remove it from finished")
                self._file = append_history_lines(path, b"".join(lines.values()))
                self._left |= set(lines)
                pending.remove_written_claims(node, lines)
                count += len(lines)
            self._left &= set(ready)
            self._sought &= set(ready)
        return count

    def _find_written_claims(
        self, folder: str, path: str, ready: EndedClaims, ends: Mapping[str, float]
    ) -> set[str]:
        """Return the claims whose line is there already."""
        unnoted = {
            token: min([part.owner.claimed_at for part in parts.values()])
            for token, parts in ready.items()
            if not all([part.noted for part in parts.values()])
        }
        try:
            info = os.lstat(path)
            file = info.st_ino, info.st_size
        except FileNotFoundError:
            file = 0, 0
        if file == (0, 0) or file != self._file or not unnoted.keys() <= self._sought:
            if file != (0, 0):  # its author may have been killed before its lines were durable
                file = append_history_lines(path, b"")
            oldest = min({**ends, **unnoted}.values())
            files = list_history_files(folder)
            self._left = find_written_tokens(files, set(ready), oldest) if files else set()
            self._sought = set(unnoted)
            self._file = file  # as it was before: one that is added meanwhile is looked for again
        return self._left & set(ready)


def append_history_lines(path: str, lines: bytes) -> tuple[int, int]:
    """Add whole lines, durably; return inode and size of the file.

    Raises OSError, and then nothing was added.

    What an interrupted call left of a line is cut off first: its claim is still in `finished/`.
    """
    fd = os.open(path, _APPEND, 0o644)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        size = repair_last_line(fd, info.st_size) if info.st_size else 0
        try:
            atomic.write_descriptor(fd, lines)
            os.fsync(fd)
            # each time: an author may have been killed before the name of a new file was durable
            folder = os.path.dirname(path)
            atomic.fsync_path(f"{folder}/.")  # a site may have a link there
            atomic.fsync_path(f"{os.path.dirname(folder)}/.")
            return info.st_ino, os.fstat(fd).st_size
        except BaseException:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def repair_last_line(fd: int, size: int) -> int:
    """Make the file end with a whole line; return its size."""
    if os.pread(fd, 1, size - 1) == b"\n":
        return size
    begin = max(0, size - LINE_LIMIT)
    tail = os.pread(fd, size - begin, begin)
    cut = tail.rfind(b"\n") + 1
    if (cut or begin == 0) and not is_whole_record(tail[cut:]):
        os.ftruncate(fd, begin + cut)
        return begin + cut
    # a line that is whole, or nothing that we ever wrote: it stays, on a line of its own
    atomic.write_descriptor(fd, b"\n")
    return size + 1


def find_written_tokens(
    files: Sequence[tuple[str, float]], tokens: set[str], oldest: float
) -> set[str]:
    """Return which tokens have their line in one of these files already; raise OSError.

    `files` are path and time of the last change, oldest first. `oldest` is when the first of these
    claims ended (epoch): no line of theirs can be in a file that was changed for the last time
    before. The last rotated file is always looked at.
    """
    found: set[str] = set()
    wanted = {token.encode() for token in tokens}
    for number, (path, changed) in enumerate(reversed(files)):
        if number > 1 and changed < oldest - DAY:
            continue
        try:
            with open_history_file(path) as file:
                for line in iter_history_lines(file):
                    match = TOKEN.search(line)
                    if match and match[1] in wanted and is_whole_record(line):
                        found.add(match[1].decode())
        except FileNotFoundError:
            continue  # rotated away meanwhile, and what is in it is older than these claims
        except DAMAGED:
            continue  # what is left of it was looked at
    return found


def list_history_files(folder: str) -> list[tuple[str, float]]:
    """Return path and time of the last change of each file of the history, oldest first.

    The one that grows is the last. A compressed file is left out while the one that it is made of
    is there: it is not whole yet, and never will be where that was cut short.
    """
    found: list[tuple[float, str]] = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        if not name.startswith(NAME) or name == NAME:
            continue
        if name.endswith(PACKED) and name.removesuffix(PACKED) in names:
            continue
        try:
            found.append((os.lstat(f"{folder}/{name}").st_mtime, name))
        except FileNotFoundError:
            continue
    paths = [(f"{folder}/{name}", changed) for changed, name in sorted(found)]
    try:
        paths.append((f"{folder}/{NAME}", os.lstat(f"{folder}/{NAME}").st_mtime))
    except FileNotFoundError:
        pass
    return paths


@contextmanager
def open_history_file(path: str) -> Generator[IO[bytes] | gzip.GzipFile]:
    """Open a file of the history, compressed or not; raise OSError for all but a regular file.

    One that was compressed since it was listed has another name by now.
    """
    try:
        fd = os.open(path, atomic.OPEN_READ)
    except FileNotFoundError:
        path += PACKED
        fd = os.open(path, atomic.OPEN_READ)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    with os.fdopen(fd, "rb", buffering=0) as file:
        if not path.endswith(PACKED):
            yield file
            return
        with gzip.open(file) as unpacked:
            yield unpacked


def iter_history_lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Yield whole lines without their end, as `spans_of` finds them."""
    for data, begin, end in iter_line_spans(file):
        yield data[begin:end]


def iter_line_spans(
    file: IO[bytes] | gzip.GzipFile, needle: bytes = b""
) -> Iterator[tuple[bytes, int, int]]:
    """Yield where whole lines are in the data, with a `needle` those that have it in them.

    A line that is longer than any record is left out. So is a last one that has no end: it is
    being written, or was cut short.
    """
    rest = b""
    skipping = False
    while chunk := file.read(CHUNK):
        data = chunk if skipping else rest + chunk
        end = data.rfind(b"\n") + 1
        begin = data.find(b"\n") + 1 if skipping and end else 0
        skipping = skipping and not end
        if end:
            yield from (
                iter_matching_spans(data, begin, end, needle)
                if needle
                else iter_all_spans(data, begin, end)
            )
            rest = data[end:]
        elif not skipping:
            rest = data
        if len(rest) > LINE_LIMIT:
            rest, skipping = b"", True


def iter_all_spans(data: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines between two places."""
    find = data.find
    while begin < end:
        stop = find(b"\n", begin)
        if stop > begin:
            yield data, begin, stop
        begin = stop + 1


def iter_matching_spans(
    data: bytes, begin: int, end: int, needle: bytes
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines between two places that have the needle in them."""
    while (hit := data.find(needle, begin, end)) >= 0:
        begin = data.find(b"\n", hit) + 1
        yield data, data.rfind(b"\n", 0, hit) + 1, begin - 1
