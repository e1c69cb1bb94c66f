# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/history: a file of JSON lines for each month (UTC) in which claims were written.

Warm. A line is written whole or taken back. Its name tells when a file was written, so whoever asks
for a time opens no other file, and HISTORY_DAYS removes whole files.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import IO, Final

from gpulock.daemon.history.record import HEAD
from gpulock.store import atomic

FOLDER: Final = "history"
MONTH_FILE: Final = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])\.jsonl")
LINE_LIMIT: Final = 1 << 20  # bytes; 128 instances with their buckets are 0.1 MB
CHUNK: Final = 1 << 16  # bytes
DAY: Final = 86400.0  # seconds that the clock may have been set back by
LAST: Final = 253402300799.0  # the end of the last year of four digits
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def name_month(at: float) -> str:
    """Return the name of the file of a moment (epoch)."""
    return time.strftime("%Y-%m.jsonl", time.gmtime(min(max(0.0, at), LAST)))


def list_months(folder: str, since: float = 0.0) -> list[str]:
    """Return the names of the files, oldest first, that may have a line of `since` or later.

    Raises OSError.
    """
    try:
        names = [name for name in os.listdir(folder) if MONTH_FILE.fullmatch(name)]
    except FileNotFoundError:
        return []
    first = name_month(since - DAY)
    return sorted(name for name in names if name >= first)


def expired_months(names: Sequence[str], days: int, now: float) -> list[str]:
    """Return the files that are older than so many days, none where that is 0. Pure.

    They count back from the last month before this one that has a file: a clock that is ahead for
    a moment ends no history. What seems to be of the future stays.
    """
    past = [name for name in names if name < name_month(now)]
    if not days or not past:
        return []
    begin = datetime.fromisoformat(f"{past[-1][:7]}-01T00:00:00+00:00").timestamp()
    return [name for name in past if name < name_month(begin - days * DAY)]


def append_history_lines(path: str, lines: bytes) -> None:
    """Add whole lines, durably; raise OSError, and then nothing was added.

    What an interrupted call left of a line is cut off first: its claim still waits.
    """
    fd = os.open(path, _APPEND, 0o644)
    try:
        length = os.fstat(fd).st_size
        size = end_of_lines(fd, length)
        if size < length:
            os.ftruncate(fd, size)
        try:
            atomic.write_descriptor(fd, lines)
            os.fsync(fd)
            sync_names(os.path.dirname(path))
        except BaseException:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def end_of_lines(fd: int, size: int) -> int:
    """Return the length of a file of `size` bytes up to the end of its last whole line."""
    while size:
        begin = max(0, size - CHUNK)
        end = os.pread(fd, size - begin, begin).rfind(b"\n") + 1
        if end:
            return begin + end
        size = begin
    return 0


def sync_names(folder: str) -> None:
    """Make the names in the history's folder, and its own, survive a power cut; raise OSError."""
    for one in (folder, os.path.dirname(folder)):
        atomic.fsync_path(f"{one}/.")  # a site may have a link there


def find_written_tokens(folder: str, tokens: Collection[str], oldest: float) -> set[str]:
    """Return which claims, of which the first began at `oldest`, have their line; raise OSError.

    It is looked for in the last two files, and in all since then. What is there is durable then:
    its author may have been killed before it was. A power cut may leave the beginning of one
    record, zeros, and the end of another in one line, which is none.
    """
    wanted = {token.encode() for token in tokens}
    written: set[str] = set()
    for name in sorted({*list_months(folder)[-2:], *list_months(folder, oldest)}):
        with os.fdopen(os.open(f"{folder}/{name}", atomic.OPEN_READ), "rb", CHUNK) as file:
            for line in iter_history_lines(file):
                head = HEAD.match(line)
                if head and head["token"][1:-1] in wanted:
                    with suppress(ValueError, RecursionError):
                        written.add(json.loads(line)["token"])
                        os.fsync(file.fileno())
    if written:
        sync_names(folder)
    return written


def iter_history_lines(file: IO[bytes], begin: int = 0) -> Iterator[bytes]:
    """Yield the whole lines that begin at `begin` or behind it.

    A line that is longer than any record is left out. So is a last one that has no end: it is
    being written, or was cut short.
    """
    file.seek(max(0, begin - 1))
    whole = begin == 0
    while line := file.readline(LINE_LIMIT):
        ended = line.endswith(b"\n")
        if whole and ended:
            yield line
        whole = ended
