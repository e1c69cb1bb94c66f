# SPDX-License-Identifier: Apache-2.0
"""Which processes are what a Grid Engine job left behind: those that carry its group.

Hot, loaded by an epilog where CLEAN is not off. execd hands a group out again, so it proves
membership only while no other living shepherd owns it.
"""

from gpulock.liveness import Scan
from gpulock.locks import Lock
from gpulock.sge.verdict import living_groups


def remains(lock: Lock, scan: Scan) -> dict[int, str]:
    """Return pid -> why, of the processes that carry a group of this job alone.

    A task of the job whose shepherd still runs (`qrsh -inherit`) is not left behind.
    """
    record = lock.owner
    assert record is not None
    owners = living_groups(scan)
    found: dict[int, str] = {}
    for gid in lock.groups():
        others = [pid for pid in owners.get(gid, []) if pid != record.pid]
        if gid and not others:
            found.update({pid: f"of the job's group {gid}" for pid in scan.carriers(gid)})
    return found
