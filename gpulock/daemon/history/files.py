# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/history: JSON lines in one file that grows, and those that logrotate put aside.

Warm. A line is written whole or taken back. It is opened anew for each batch, so that logrotate
may rename it at any time and nobody needs a signal. Whoever writes holds the folder's gate.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO, Final

from gpulock.store import atomic
from gpulock.store.quarantine import fsync_path

FOLDER: Final = "history"
NAME: Final = "history.jsonl"
PACKED: Final = ".gz"
LINE_LIMIT: Final = 1 << 20  # bytes; 128 instances with their buckets are 0.1 MB
CHUNK: Final = 1 << 16  # bytes: of larger ones the allocator asks the kernel each time
DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile)  # of a compressed file
DAY: Final = 86400.0  # seconds that the clock may have been set back by
TOKEN: Final = re.compile(rb'"token":"([0-9A-Za-z]{1,64})"')
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_history_folder(path: str) -> None:
    """Make the folder where it is missing; raise OSError. A site may set its mode."""
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return


def append_history_lines(path: str, lines: bytes) -> None:
    """Add whole lines, durably; raise OSError, and then nothing was added.

    What an interrupted call left of a line is cut off first: its claim is still in `released/`.
    """
    fd = os.open(path, _APPEND, 0o644)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        size = repair_last_line(fd, info.st_size)
        try:
            atomic.write_descriptor(fd, lines)
            os.fsync(fd)
            if info.st_size == 0:  # perhaps it is new
                fsync_path(os.path.realpath(os.path.dirname(path)))
        except BaseException:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def repair_last_line(fd: int, size: int) -> int:
    """Make the file end with a whole line; return its size."""
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    begin = max(0, size - LINE_LIMIT)
    tail = os.pread(fd, size - begin, begin)
    cut = tail.rfind(b"\n") + 1
    try:
        json.loads(tail[cut:])
    except (ValueError, RecursionError):
        if cut or begin == 0:
            os.ftruncate(fd, begin + cut)
            return begin + cut
    # a line that is whole, or nothing that we ever wrote: it stays, on a line of its own
    atomic.write_descriptor(fd, b"\n")
    return size + 1


def find_written_tokens(folder: str, tokens: set[str], oldest: float) -> set[str]:
    """Return which tokens have their line already; raise OSError.

    `oldest` is when the first of these claims ended (epoch): no line of theirs can be in a file
    that was changed for the last time before. The last file put aside is always looked at.
    """
    found: set[str] = set()
    wanted = {token.encode() for token in tokens}
    paths = list_history_files(folder)
    for number, (path, changed) in enumerate(reversed(paths)):
        if number > 1 and changed < oldest - DAY:
            continue
        try:
            with open_history_file(path) as file:
                for line in iter_history_lines(file):
                    match = TOKEN.search(line)
                    if match and match[1] in wanted:
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
