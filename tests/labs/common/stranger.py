# SPDX-License-Identifier: Apache-2.0
"""A hostile job without a GPU: it opens every device, has many descriptors, and forks for ever.

Most of its processes share one memory, and with it the lock that a look at their titles takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.labs.common.installed import SOAK

# Processes with as many descriptors as one may have, and processes that share one memory.
CROWD: Final = (100, 3000) if SOAK else (60, 300)
# each process of the crowd has this many descriptors, and the look at one costs a few microseconds
PROGRAM = """\
import ctypes, mmap, os, resource, signal, sys, time
told, many, sharing, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
opened = [os.open(path, os.O_RDWR) for path in devices]
libc = ctypes.CDLL(None, use_errno=True)
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
pause, room = ctypes.cast(libc.pause, ctypes.c_void_p), 16384
stacks = mmap.mmap(-1, room * (sharing + 1))
lowest = ctypes.addressof(ctypes.c_char.from_buffer(stacks))
CLONE_VM = 0x100
for number in range(sharing):
    top = lowest + room * (number + 1)
    if libc.clone(pause, top, CLONE_VM | signal.SIGCHLD, None) < 0:
        sys.exit(f"process {number} of {sharing}: {os.strerror(ctypes.get_errno())}")
try:
    for _ in range(min(limit, 20000) - 20):
        os.dup(opened[0])
except OSError:
    pass
for _ in range(many):
    if not os.fork():
        time.sleep(1000)
open(told, "w").write("ready")
for _ in range(2):
    if not os.fork():
        for _ in range(3000):  # where nobody waits for them they stay as zombies
            if os.path.exists(f"{told}.stop") or os.fork():
                os._exit(0)
            time.sleep(0.002)
        os._exit(0)
time.sleep(1000)
"""


def stranger_script(told: Path, devices: Sequence[Path]) -> str:
    """Return a job that does so, and writes `told` once it has; `told.stop` ends the forks."""
    place = told.with_suffix(".py")
    words = " ".join(map(str, [told, *CROWD, *devices]))
    return f"cat >{place} <<'EOF'\n{PROGRAM}EOF\nexec python3 {place} {words}\n"
