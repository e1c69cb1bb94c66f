# SPDX-License-Identifier: Apache-2.0
"""XIDs and SXids of the NVIDIA driver, from the kernel's log (/dev/kmsg of DEV_ROOT).

A read gives one record, `priority,sequence,microseconds,flags;text` with further lines behind it
(Documentation/ABI/testing/dev-kmsg). Only the kernel writes records of its own facility: a user's
line in /dev/kmsg has another. A driver that is loaded anew has forgotten what came before.
"""

from __future__ import annotations

import os
import re
import time
from typing import Final

from gpulock.daemon.health.cards import NodeCards
from gpulock.deadline import clock_boottime

KMSG: Final = "kmsg"
RECORD: Final = 8192  # bytes that the kernel gives at most of one
MOST_RECORDS: Final = 1 << 15  # at one look: the rest is read at the next one
OFF_THE_BUS: Final = 79  # the XID of a card that has fallen off the bus
SAME_FALL: Final = 10.0  # seconds in which the driver tells of it with its number and without
HEAD: Final = re.compile(r"(\d{1,3}),(\d{1,19}),(\d{1,19}),[^;]*;(.*)")
_BUS = r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})"
ERROR: Final = re.compile(
    rf"(?:NVRM: Xid|nvidia-nvswitch\d+: SXid) \(PCI:{_BUS}[^)]*\): (\d{{1,5}})\b", re.I
)
FALLEN: Final = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_BUS}\.0\b.*fallen off the bus", re.I)
LOADING: Final = "NVRM: loading NVIDIA UNIX"


def count_record(cards: NodeCards, record: str, suspended: float) -> None:
    """Count the error that a record of the kernel tells of, unless it was counted before.

    The kernel's clock stands while the machine is suspended.
    """
    head = HEAD.match(record)
    if head is None or int(head[2]) <= cards.sequence or int(head[1]) >> 3:
        return
    text, at = head[4], int(head[3]) / 1e6 + suspended
    error, fallen = ERROR.match(text), FALLEN.match(text)
    if text.startswith(LOADING):
        cards.loaded = at
    elif event := error or fallen:
        key = f"{event[1].lower()}.0", int(error[2]) if error else OFF_THE_BUS
        times, last = cards.xids.get(key, (0, -SAME_FALL))
        if not error and at - last < SAME_FALL:
            return
        cards.xids[key] = times + 1, at
    else:
        return
    cards.sequence = int(head[2])


class KernelLog:
    """The log, kept open between two looks."""

    def __init__(self) -> None:
        self._fd = -1
        self._sequence = -1  # of the cards that the last look left

    def read(self, dev_root: str, cards: NodeCards) -> bool:
        """Count what is new; return whether records were overwritten before they were read.

        Raises OSError where the log cannot be read.
        """
        overwritten = False
        if self._fd < 0 or self._sequence != cards.sequence:
            self.close()  # what was counted of it is lost, or was never kept
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(f"{dev_root}/{KMSG}", flags)
        suspended = clock_boottime() - time.clock_gettime(time.CLOCK_MONOTONIC)
        try:
            for _ in range(MOST_RECORDS):
                try:
                    records = os.read(self._fd, RECORD)
                except BrokenPipeError:
                    overwritten = True  # the next read gives the oldest that is left
                    continue
                if not records:
                    break
                for record in records.decode("utf-8", "replace").split("\n"):
                    count_record(cards, record, suspended)
        except BlockingIOError:
            pass  # no more records
        finally:
            self._sequence = cards.sequence
        return overwritten

    def close(self) -> None:
        """Close the log: the next look begins at its oldest record."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
