# SPDX-License-Identifier: Apache-2.0
"""One worker process: its frames, its last words, and the page in which it names its calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpulock_exporter.frame import (
    PAGE,
    CallNote,
    DeviceTelemetry,
    DriverCall,
    Frame,
    decode_frame,
    encode_frame,
    read_driver_call,
)
from gpulock_exporter.worker.process import CANNOT_OPEN
from gpulock_exporter.worker.supervisor import LINE_LIMIT, WorkerChild

from gpulock.alloc.process_owner import COMM
from gpulock.node.settings import Settings
from tests.support.wait import wait_until

CALL = DriverCall(10.0, 3, "0000:3b:00.0", "nvmlDeviceGetTemperature")
LOOKED = Frame(2.0, devices=[DeviceTelemetry("0000:3b:00.0", "GPU-1", 0)])
WORDS = encode_frame(LOOKED).decode().strip()


def test_a_note_tells_card_and_call_to_the_other_process_that_has_its_page() -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE.size)
    note = CallNote(fd)
    told: list[DriverCall | None] = [read_driver_call(os.pread(fd, PAGE.size, 0))]
    note.enter_card(3, "0000:3b:00.0")
    for _ in range(2):
        note.name_call(b"nvmlDeviceGetTemperature")
        told.append(read_driver_call(os.pread(fd, PAGE.size, 0)))
        note.leave_card()
        told.append(read_driver_call(os.pread(fd, PAGE.size, 0)))
    os.close(fd)
    plain = [one and one._replace(since=10.0) for one in told]
    assert plain == [None, CALL, None, None, None], "a call of no card holds up all"


@pytest.mark.parametrize("page", [b"", b"\x01" * (PAGE.size - 1), bytes(PAGE.size)])
def test_a_page_that_is_not_whole_names_no_call(page: bytes) -> None:
    assert read_driver_call(page) is None
    call = read_driver_call(PAGE.pack(10.0, 3, b"\xff\n", b"a\nb"))  # whatever a worker writes
    assert call is not None and (call.bus + call.name).isprintable()


@contextmanager
def running(script: str) -> Generator[tuple[WorkerChild, list[Frame]]]:
    """Give a worker that is a shell script, and the first frames that it sent."""
    child, found = WorkerChild(["/bin/sh", "-c", script, "sh"], {"GOOD": WORDS}, 0.0), list[Frame]()
    try:
        while not found:
            found += child.receive(1.0)
        yield child, found
    finally:
        child.kill(1.0)
        child.process.wait()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo garbage", "not a frame"),
        (f'head -c {2 * LINE_LIMIT} /dev/zero; echo; echo "$GOOD"', "a frame without end"),
    ],
)
def test_garbage_is_no_frame(script: str, words: str) -> None:
    with pytest.raises(ValueError, match=words), running(script):
        pass


def test_what_a_worker_says_between_frames_is_not_kept(tmp_path: Path) -> None:
    wait = f"while ! [ -e {tmp_path}/go ]; do sleep 0.02; done"
    with running(f'echo noise >&2; echo "$GOOD"; {wait}; echo "the end" >&2') as (child, found):
        assert (found, child.is_heard, child.since) == ([LOOKED], True, 1.0)
        (tmp_path / "go").touch()
        wait_until(child.last_words, why="its last words")
        assert child.last_words() == "the end"


def test_a_worker_cannot_take_the_page_from_under_its_supervisor() -> None:
    body = 'for word; do page=${word#note=}; done; : > /proc/self/fd/$page; echo "$GOOD"'
    with running(body) as (child, _):
        assert child.call() is None


ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import os, sys
from gpulock_exporter.frame import Frame
from gpulock_exporter.worker import process

class Chatty:
    def open(self): os.write(1, b"opened")
    def collect(self, processes):
        os.write(1, b"NVRM: warning {")
        print("looked", flush=True)
        return Frame(2.0, complete=processes)
    def close(self): os.write(1, b"closed")

process.make_frame_source = lambda *_: Chatty()
sys.exit(process.main(["worker", "0.01", "1000", "nvml", "frames=2"]))
"""


ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}


def run_worker(program: str) -> subprocess.CompletedProcess[bytes]:
    """Let a worker take two looks."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=ENV,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
def test_a_library_that_prints_on_standard_output_spoils_no_frame() -> None:
    done = run_worker(PROGRAM)
    frames = [decode_frame(line) for line in done.stdout.splitlines()]
    assert [frame.complete for frame in frames] == [True, False], "lists are asked for seldom"
    assert done.returncode == 0
    assert done.stderr.count(b"NVRM: warning {looked") == 2
    assert done.stderr.startswith(b"opened") and done.stderr.endswith(b"closed")


@pytest.mark.slow
def test_a_driver_that_is_gone_is_an_exit_code_for_who_tries_a_card() -> None:
    done = run_worker(PROGRAM.replace('os.write(1, b"opened")', 'raise RuntimeError("NVML: gone")'))
    assert (done.returncode, done.stderr) == (CANNOT_OPEN, b"NVML: gone\nclosed")


@pytest.mark.slow
def test_a_worker_has_an_allowed_name_and_ends_when_nobody_reads_its_frames() -> None:
    forever = PROGRAM.replace(', "frames=2"', "")
    with subprocess.Popen(
        [sys.executable, "-c", forever], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as worker:
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline()
            name = Path(f"/proc/{worker.pid}/comm").read_text().strip()
            worker.stdout.close()
            assert worker.wait(60) == 0
        finally:
            worker.kill()
    assert name in [word[:COMM] for word in Settings({}).allowed_processes]
