# SPDX-License-Identifier: Apache-2.0
"""A thread that hangs, all others of its process going on: a tracer holds it (ptrace(2))."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator, Sequence

TRACER = """
import ctypes, os, sys
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.restype, ptrace.argtypes = ctypes.c_long, [ctypes.c_long] * 4
thread = int(sys.argv[1])
for request in (SEIZE, INTERRUPT):
    if ptrace(request, thread, 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(thread, WALL)
print("held", flush=True)
os.waitpid(thread, WALL)
"""


@contextlib.contextmanager
def frozen(enter: Sequence[str], thread: int) -> Generator[None]:
    """Let a thread go no further, until its process is killed; `enter` leads to its namespaces."""
    words = [*enter, "/usr/bin/python3", "-c", TRACER, str(thread)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout is not None and tracer.stderr is not None
            assert tracer.stdout.readline() == b"held\n", tracer.stderr.read()
            yield
        finally:
            tracer.kill()
