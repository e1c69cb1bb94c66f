# SPDX-License-Identifier: Apache-2.0
"""The child that speaks NVML: it looks, writes a frame, and sleeps; the parent may kill it.

Usage: python -m gpulock_exporter.worker.process PERIOD LISTS SOURCE [NAME=VALUE ...];
it looks each PERIOD seconds, at process lists each LISTS; SOURCE is `nvml` or `simulated:DIR`.
`note=FD` is the page in which it names its calls, `without=3,5` are the cards that it does not ask,
`only=3` the one that it asks; `frames=2`: so many it writes, and then ends.

A call into a driver that hangs cannot be interrupted from within, so everything that could hang is
here. It ends when nobody reads its frames any more; and where it hangs at that time, the kernel
kills it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpulock.deadline import clock_boottime
from gpulock.store.atomic import write_descriptor
from gpulock_exporter.frame import CallNote, encode_frame

if TYPE_CHECKING:
    from gpulock_exporter.nvml.source import NvmlSource
    from gpulock_exporter.worker.simulated import SimulatedSource

    FrameSource = NvmlSource | SimulatedSource

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CANNOT_OPEN = 3  # exit code: no driver, or one that does not answer as it should


def main(argv: list[str]) -> int:
    """Look until nobody reads; return the exit code."""
    die_with_parent()
    name_process()
    frames = os.dup(1)
    os.dup2(2, 1)  # what a library prints there is no frame
    period, lists, name = float(argv[1]), float(argv[2]), argv[3]
    words = dict(word.split("=", 1) for word in argv[4:])
    source = make_frame_source(name, words)
    left = int(words.get("frames", 0))
    due = lists_due = clock_boottime()
    try:
        source.open()
        while True:
            time.sleep(max(0.0, due - clock_boottime()))
            now = clock_boottime()
            with_lists = now >= lists_due
            lists_due = now + lists if with_lists else lists_due
            write_descriptor(frames, encode_frame(source.collect(with_lists)))
            left -= 1
            if not left:
                break
            # a look that took long does not make the next hurry
            due = max(due + period, clock_boottime())
    except BrokenPipeError:
        pass
    except RuntimeError as fault:  # the whole driver is gone: the next worker opens it again
        os.write(2, f"{fault}\n".encode())
        return CANNOT_OPEN
    finally:
        source.close()
    return 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the exporter's main thread is over, prctl(2).

    A driver that hangs would else keep it, beside the worker of the next exporter.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)  # without it, all else still holds


def name_process() -> None:
    """Have the name by which ALLOWED_PROCESSES knows the exporter; Python's own says nothing."""
    try:
        Path("/proc/self/comm").write_text("gpulock-exporter", encoding="ascii")
    except OSError:
        return  # its processes count as foreign


def make_frame_source(name: str, words: Mapping[str, str]) -> FrameSource:
    """Return the source of a name; nothing of another one is imported."""
    kind, _, folder = name.partition(":")
    if kind == "simulated":
        from gpulock_exporter.worker.simulated import SimulatedSource

        return SimulatedSource(folder)
    from gpulock_exporter.nvml.answers import NAMED
    from gpulock_exporter.nvml.source import NvmlSource

    NAMED.note = CallNote(int(words.get("note", -1)))
    without, only = words.get("without", "").split(","), words.get("only", "")
    return NvmlSource(wanted=lambda card: str(card) == only if only else str(card) not in without)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
