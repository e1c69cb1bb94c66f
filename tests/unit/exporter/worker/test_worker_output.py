# SPDX-License-Identifier: Apache-2.0
"""What a library prints is none of the worker's frames."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpulock_exporter.frame import decode_frame
from gpulock_exporter.worker.process import CANNOT_OPEN

from gpulock.alloc.process_owner import COMM
from gpulock.node.settings import Settings

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import os, sys
from gpulock_exporter.frame import Frame
from gpulock_exporter.worker import process

class Chatty:
    def open(self): os.write(1, b"opened")
    def look(self, processes):
        os.write(1, b"NVRM: warning {")
        print("looked", flush=True)
        return Frame(2.0, complete=processes)
    def close(self): os.write(1, b"closed")

process.make_frame_source = lambda *_: Chatty()
sys.exit(process.main(["worker", "0.01", "1000", "nvml", "looks=2"]))
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


@contextmanager
def running_worker() -> Generator[subprocess.Popen[bytes]]:
    """Give a worker that has written a frame, and goes on."""
    forever = PROGRAM.replace(', "looks=2"', "")
    with subprocess.Popen(
        [sys.executable, "-c", forever], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline()
        try:
            yield worker
        finally:
            worker.kill()


@pytest.mark.slow
def test_a_worker_ends_when_nobody_reads_its_frames() -> None:
    with running_worker() as worker:
        assert worker.stdout is not None
        worker.stdout.close()
        assert worker.wait(60) == 0


@pytest.mark.slow
def test_a_worker_has_the_name_of_an_allowed_process() -> None:
    with running_worker() as worker:
        name = Path(f"/proc/{worker.pid}/comm").read_text().strip()
    assert name in [word[:COMM] for word in Settings({}).allowed_processes]
