# SPDX-License-Identifier: Apache-2.0
"""A real gpulockd on a node of a lab, in the node's own namespaces."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from tests.labs.daemon_site import GPULOCKD
from tests.labs.sge_gpulock import CONFIG
from tests.labs.sge_wait import until

PERIOD = 30.0  # seconds between two reconciles
SIGHTLESS = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")


class Daemon:
    """A gpulockd that runs; `lock_dir` is where this process finds its LOCK_DIR."""

    def __init__(self, process: subprocess.Popen[bytes], lock_dir: Path, log: Path) -> None:
        self.process = process
        self.lock_dir = lock_dir
        self._log = log

    def said(self) -> str:
        """Return all that it said."""
        return self._log.read_text()

    def frees(self, locked: Callable[[], object], *, seconds: float = PERIOD + 5) -> float:
        """Wait until nothing is `locked` any more; return how long that took."""
        begun = time.monotonic()
        until(lambda: not locked(), what="gpulockd to free", seconds=seconds, why=self.said)
        return time.monotonic() - begun

    def goes_round(self) -> None:
        """Have it reconcile, and wait until it has."""
        verdicts = self.lock_dir / "verdicts"
        before = verdicts.stat().st_ino
        self.process.send_signal(1)
        until(lambda: verdicts.stat().st_ino != before, what="a reconcile", why=self.said)


@contextlib.contextmanager
def gpulockd(enter: Sequence[str], lock_dir: Path, log: Path, *around: str) -> Generator[Daemon]:
    """Run a gpulockd on a node; `around` are words before its command."""
    argv = [*enter, *around, sys.executable, "-c", GPULOCKD, "--config", CONFIG]
    (lock_dir / "verdicts").unlink(missing_ok=True)
    with log.open("wb") as stderr:
        process = subprocess.Popen(argv, stderr=stderr, env={"PATH": "/usr/sbin:/usr/bin:/bin"})
    daemon = Daemon(process, lock_dir, log)
    try:
        until((lock_dir / "verdicts").exists, what="gpulockd's first reconcile", why=daemon.said)
        yield daemon
    finally:
        process.terminate()
        assert process.wait(10) == 0, daemon.said()
