# SPDX-License-Identifier: Apache-2.0
"""A job that is hostile to any scheduler's node keeps no GPU of another user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import SHOW, Site
from tests.labs.common.installed import SOAK, gate_file, shut_gate
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
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


def test_a_job_that_hides_and_has_every_device_open_keeps_no_other_users_lock(site: Site) -> None:
    """Tried: a job without a GPU opens all, by processes that are full, share a memory, or fork on.

    Stopped by: a lock is held by its owner's processes alone.
    """
    devices = sorted((site.gpus.drivers / site.node / "dev").glob("nvidia[0-9]*"))
    for device in devices:
        device.chmod(0o666)
    told = gate_file(site.gpus, "stranger", site.bob)
    stop = gate_file(site.gpus, "stranger.stop", site.bob)
    go, until_go = site.waiting("go")
    job = site.start(site.count, until_go)
    stranger = site.submit(0, stranger_script(told, devices), user=site.bob)
    wait_until(told.exists, why="the stranger to be ready")
    go.touch()
    site.wait_over(job)
    assert site.locks() == {}
    again = site.submit(site.count, SHOW)
    site.wait_over(again)
    assert "mask=0," in site.said(again)
    stop.touch()
    site.cancel(stranger)
    site.wait_empty()
    assert site.in_service()


@EVERY
def test_a_gate_that_a_stopped_process_holds_sends_jobs_back_and_stops_no_node(site: Site) -> None:
    """Tried: a process holds the gate and stops, while one job begins and another one ends.

    Stopped by: no hook waits longer than 20 s at the gate. What the job that ended has held is
    freed by the next reconcile.
    """
    ending = site.start(1)
    with shut_gate(site.gpus, site.node):
        job = site.submit(site.count - 1, SHOW, user=site.bob)
        said = site.wait_sent_back(job)
        assert "unknown: timed out on the lock /run/gpulock.claims/gate" in said
        assert site.in_service()
        site.end(ending)
        assert len(site.held(ending)) == 1
    site.reap()
    assert site.held(ending) == []
    site.begin(job)
    site.wait_over(job)
    assert "mask=" in site.said(job)


def stranger_script(told: Path, devices: Sequence[Path]) -> str:
    """Return a job that does so, and writes `told` once it has; `told.stop` ends the forks."""
    place = told.with_suffix(".py")
    words = " ".join(map(str, [told, *CROWD, *devices]))
    return f"cat >{place} <<'EOF'\n{PROGRAM}EOF\nexec python3 {place} {words}\n"
