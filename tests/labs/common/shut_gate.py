# SPDX-License-Identifier: Apache-2.0
"""A gate that somebody holds and does not let go."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

from tests.support.wait import wait_until

_HOLD: Final = (
    "import fcntl, os, signal, sys\n"
    "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
    "fcntl.flock(fd, fcntl.LOCK_EX)\n"
    "os.kill(os.getpid(), signal.SIGSTOP)\n"
)


@contextlib.contextmanager
def held(gate: Path) -> Generator[None]:
    """Hold a gate by a process that is stopped."""
    with subprocess.Popen([sys.executable, "-IS", "-c", _HOLD, str(gate)]) as holder:
        try:
            stopped = Path(f"/proc/{holder.pid}/status")
            wait_until(lambda: "\nState:\tT" in stopped.read_text(), why="the gate to be held")
            yield
        finally:
            holder.kill()
