# SPDX-License-Identifier: Apache-2.0
"""A hostile job without a GPU: it opens every device, has many descriptors, and forks for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# each process of the crowd has this many descriptors, and the look at one costs a few microseconds
PROGRAM = """\
import os, resource, sys, time
told, devices = sys.argv[1], sys.argv[2:]
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
opened = [os.open(path, os.O_RDWR) for path in devices]
try:
    for _ in range(min(limit, 20000) - 20):
        os.dup(opened[0])
except OSError:
    pass
for _ in range(60):
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
    words = " ".join(map(str, [told, *devices]))
    return f"cat >{place} <<'EOF'\n{PROGRAM}EOF\nexec python3 {place} {words}\n"
