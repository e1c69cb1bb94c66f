# SPDX-License-Identifier: Apache-2.0
"""The child that speaks NVML: it looks, writes a frame, and sleeps; the parent may kill it.

Usage: python -m gpulock_exporter.worker.process PERIOD LISTS SOURCE [NAME=VALUE ...];
SOURCE is `nvml` or `simulated:DIR`. `note=FD` is where it names its calls, `without=3/8` the cards
that it does not ask, `only=3/8` the one that it tries with a few looks, and then ends. A call into
a driver that hangs cannot be interrupted from within, so everything that could hang is here. It
reads from its standard input, a line each, which cards are shared. It ends when that does: then
nobody reads any more; and where it hangs at that time, the kernel kills it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Collection

from gpulock.deadline import clock_boottime
from gpulock_exporter.driver_calls import CallNote, CardFilter, parse_card_filter
from gpulock_exporter.telemetry import FrameSource, encode_frame

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CHUNK = 1 << 16  # bytes: what a pipe holds, pipe(7)
CANNOT_OPEN = 3  # exit code: no driver, or one that does not answer as it should
TRIAL_LOOKS = 2  # at a card that has hung: some of the calls are made from the second look on


def main(argv: list[str]) -> int:
    """Look until standard input ends; return the exit code."""
    die_with_parent()
    frames = os.dup(1)
    os.dup2(2, 1)  # what a library prints there is no frame
    period, process_period, name = float(argv[1]), float(argv[2]), argv[3]
    words = dict(word.split("=", 1) for word in argv[4:])
    cards = parse_card_filter(words)

    def send(line: bytes) -> None:
        write_frame_line(frames, line)

    source = make_frame_source(name, CallNote(int(words.get("note", -1))), cards)
    try:
        source.open()
    except RuntimeError as fault:
        os.write(2, f"{fault}\n".encode())
        return CANNOT_OPEN
    try:
        looks = None if cards.only is None else TRIAL_LOOKS
        run_worker(source, period, process_period, sys.stdin.fileno(), send, looks)
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


def make_frame_source(name: str, note: CallNote, cards: CardFilter) -> FrameSource:
    """Return the source of a name; nothing of another one is imported."""
    kind, _, folder = name.partition(":")
    if kind == "simulated":
        from gpulock_exporter.simulated.source import SimulatedSource

        return SimulatedSource(folder)
    from gpulock_exporter.nvml.named_calls import NAMED
    from gpulock_exporter.nvml.source import NvmlSource

    NAMED.note = note
    return NvmlSource(note=note, cards=cards)


def run_worker(
    source: FrameSource,
    period: float,
    process_period: float,
    parent: int,
    send: Callable[[bytes], None],
    looks: int | None = None,
) -> None:
    """Look every `period` seconds, at process lists every `process_period`; so often, or on."""
    due = clock_boottime()
    processes_due = due
    shared: Collection[str] | None = ()
    while shared is not None:
        now = clock_boottime()
        with_processes = now >= processes_due
        if with_processes:
            processes_due = now + process_period
        send(encode_frame(source.look(with_processes, shared)))
        looks = looks - 1 if looks else looks
        if looks == 0:
            return
        # a look that took long does not make the next hurry
        due = max(due + period, clock_boottime())
        shared = sleep_until_next_look(parent, due, shared)


def sleep_until_next_look(
    parent: int, due: float, shared: Collection[str]
) -> Collection[str] | None:
    """Sleep; return the cards that the parent named as shared last, by bus id.

    Return None where the parent has closed our standard input. Each of its lines has all of them.
    """
    while select.select([parent], [], [], max(0.0, due - clock_boottime()))[0]:
        heard = os.read(parent, CHUNK)
        if not heard:
            return None
        lines = heard.decode("ascii", "replace").split("\n")
        shared = frozenset(lines[-2].split()) if lines[1:] else shared
    return shared


def write_frame_line(fd: int, line: bytes) -> None:
    """Write a whole frame; the parent reads whatever comes."""
    view = memoryview(line)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
