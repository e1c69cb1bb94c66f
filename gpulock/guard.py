# SPDX-License-Identifier: Apache-2.0
"""The last guard of every reap and release: nobody may still have the device open.

Hot, loaded with a release. A process holds a device when one of its file descriptors is the
device's node, told by its number (rdev), wherever the node stands. What a killed or daemonised
job leaves behind is found here although it is in no session and under no parent.
"""

import os
import stat

from gpulock.devices import MAJOR, Device
from gpulock.liveness import Scan, executable, is_system, session
from gpulock.locks import Lock
from gpulock.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

INIT = 1  # was there before any job, and may hide its files even from root
DAEMONS = frozenset(("sge_execd", "sge_shepherd", "slurmd", "slurmstepd"))


def node_keys(device: Device, dev_root: str) -> list[tuple[int, int, int]]:
    """Return what the device's node looks like to fstat: (rdev, 0, 0), or a simulated file's."""
    keys = [(os.makedev(MAJOR, device.minor), 0, 0)] if device.minor >= 0 else []
    try:
        info = os.stat(f"{dev_root}/nvidia{device.minor}")
    except OSError:
        return keys
    return [*keys, key_of(info)]


def key_of(info: os.stat_result) -> tuple[int, int, int]:
    """Return what tells one device node or simulated node from another."""
    if stat.S_ISCHR(info.st_mode):
        return (info.st_rdev, 0, 0)
    return (0, info.st_dev, info.st_ino)


class Holders:
    """Who has which device's node open; one pass over all file descriptors, when first asked."""

    __slots__ = ("_keys", "_open", "_services", "blind", "scan")

    def __init__(
        self, scan: Scan, devices: "Iterable[Device]", dev_root: str, services: tuple[str, ...]
    ) -> None:
        self.scan = scan
        self._services = frozenset(services)
        self._keys: dict[tuple[int, int, int], list[str]] = {}
        for device in devices:
            for key in node_keys(device, dev_root):
                self._keys.setdefault(key, []).append(device.id)
        self._open: dict[str, list[int]] | None = None
        self.blind = ""

    def of(self, device: str) -> list[int]:
        """Return the processes, services left out, that have a device's node open."""
        if self._open is None:
            self._open = self._look()
        return self._open.get(device, [])

    def _look(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        if not self._keys:
            return found
        root = self.scan.proc.root
        for pid, status in self.scan.statuses().items():
            if status.kernel:
                continue
            folder = f"{root}/{pid}/fd"
            held: set[str] = set()
            try:
                for fd in os.listdir(folder):
                    # readlink never waits, a stat of a file on a hung NFS server would
                    try:
                        if "nvidia" not in os.readlink(f"{folder}/{fd}"):
                            continue
                        info = os.stat(f"{folder}/{fd}")
                    except FileNotFoundError:
                        continue
                    held.update(self._keys.get(key_of(info), ()))
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError as fault:
                if pid != INIT and os.geteuid() in (0, status.uids[0]):
                    self.blind = f"the files of process {pid} cannot be seen: {fault}"
                continue
            if held and not self._is_service(pid):
                for device in held:
                    found.setdefault(device, []).append(pid)
        return found

    def _is_service(self, pid: int) -> bool:
        """Return whether a process is a named service: a system user's, from no job."""
        scan = self.scan
        status = scan.statuses()[pid]
        if not is_system(status) or executable(scan.proc, pid) not in self._services:
            return False
        daemons = frozenset([p for p, s in scan.statuses().items() if s.name in DAEMONS])
        return not scan.descends(pid, daemons)


def group_left(lock: Lock, scan: Scan) -> str:
    """Return which process of the job's own is still there, as a clause, or nothing.

    By the supplementary groups of the job and of its tasks here (`lock` has its details read);
    of a process's claim, or a simulated job, by the session that stands for them.
    """
    record = lock.owner
    assert record is not None
    for gid in lock.groups():
        carriers = scan.carriers(gid)
        if carriers:
            return f"process {carriers[0]} carries the job's group {gid}"
    for pid, start, _ in lock.anchors:
        if scan.proc.running(pid, start):
            return f"shepherd {pid} of a task runs"
    if not record.add_grp_id and record.sid > 0:
        members = [pid for pid in session(scan, record.sid) if pid != record.pid]
        if members:
            return f"process {members[0]} is of its session {record.sid}"
    return scan.blind


def open_left(device: str, record: Owner, holders: Holders, others: frozenset[int]) -> str:
    """Return who has one device open, as a clause for people, or nothing.

    Processes of `others` (the supplementary groups of other jobs that hold locks) are not this
    job's and do not keep its lock: without a device cgroup, CUDA opens every node it can see.
    """
    for pid in holders.of(device):
        groups = holders.scan.statuses()[pid].groups
        if not groups & (others - {record.add_grp_id}):
            return f"process {pid} has {device} open"
    return holders.blind
