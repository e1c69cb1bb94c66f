# SPDX-License-Identifier: Apache-2.0
"""The last guard of every reap and release: nobody may still have the device open.

Hot, loaded with a release. A process holds a device when one of its file descriptors is the
device's node, told by its number (rdev). What a killed or daemonised
job leaves behind is found here although it is in no session and under no parent.
"""

import errno
import os
import time

from gpulock.alloc.process_reader import ONE_USER, too_much_of
from gpulock.alloc.process_scan import ROUNDS, ProcessScan
from gpulock.node.devices import MAJOR, SHARE, Device, card_bus_id
from gpulock.node.file_tables import list_own_tables
from gpulock.node.procfs import INIT, OVER, device_file_key
from gpulock.store import atomic
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpulock.node.mounts import Mounts
    from gpulock.node.settings import Settings

LOOK_SECONDS = (
    5.0  # seconds for a whole look, of which a gpulockd that serves users waits for ONE_USER
)
OFTEN = 1024  # descriptors between two looks at the clock
PAUSE = 0.0005  # seconds before a process that hides is looked at again, doubled each time
SEALED = "open files of its user were not looked at before the gate"
LONG_PATH = "/dev/..."  # in place of a path that is too long: it may be a node
COMMON = (
    *("/dev/null", "/dev/pts/", "/dev/ptmx", "/dev/tty", "/dev/shm/", "/dev/mqueue/"),
    *("/dev/zero", "/dev/random", "/dev/urandom", "/dev/fuse"),
)


def device_node_keys(
    device: Device, dev_root: str, driver_root: str = ""
) -> list[tuple[int, int, int]]:
    """Return what the device's nodes look like to fstat: (rdev, 0, 0), or a simulated file's.

    Of a MIG instance its own access nodes, since all instances share the card's; where those
    cannot be found out, the card's. NVIDIA's number is used where `dev_root` has no node.
    """
    names = mig_access_nodes(device, driver_root) if device.parent and driver_root else []
    keys: list[tuple[int, int, int]] = []
    if not names:
        names = [f"nvidia{device.minor}"]
    for name in names:
        try:
            keys.append(device_file_key(os.stat(f"{dev_root}/{name}")))
        except OSError:
            if device.parent and "caps" in name:
                return device_node_keys(device, dev_root)
            if device.minor >= 0:
                keys.append((os.makedev(MAJOR, device.minor), 0, 0))
    return keys


def mig_access_nodes(device: Device, driver_root: str) -> list[str]:
    """Return the access nodes of a MIG instance, by the driver's table of their minors."""
    try:
        table = atomic.read_text(f"{driver_root}-caps/mig-minors", 1 << 20)
    except OSError:
        return []
    gpu, compute = device.id.split(".")[-2:]
    instance = f"gpu{device.minor}/{gpu}"
    nodes: list[str] = []
    for wanted in (f"{instance}/access", f"{instance}/{compute}/access"):
        minors = [line.split()[1] for line in table.split("\n") if line.split()[:1] == [wanted]]
        if len(minors) != 1:
            return []
        nodes.append(f"nvidia-caps/nvidia-cap{minors[0]}")
    return nodes


class OpenFiles:
    """Who has which device's node open; one pass over the descriptors of a user, or of all users.

    A lock is held by its owner's processes alone, so only those decide. To look at everybody's is
    for people, and may be partial. `blind` is the first reason why something may have been missed,
    `devices_unknown` one that is told from outside: which nodes there are is not known.
    """

    def __init__(
        self,
        scan: ProcessScan,
        devices: "Iterable[Device]",
        settings: "Settings",
    ) -> None:
        self.scan = scan
        self._dev_root, self._driver_root = settings.dev_root, settings.driver_root
        self._isolated = settings.isolation != "off"
        # of a simulated node, perhaps below /dev/shm
        self._simulated = () if self._dev_root == "/dev" else (f"{self._dev_root}/",)
        self._services = frozenset(settings.allowed_processes)
        self._keys: dict[tuple[int, int, int], list[str]] = {}
        # by user, or None for all: the pids by device, and why there may be more
        self._answers: "dict[int | None, tuple[dict[str, list[int]], str]]" = {}
        self.ids: set[str] = set()
        for device in devices:
            self.add(device)
        self._mounts: "Mounts | None" = None
        self._late = 0.0
        self.blind = ""
        self.devices_unknown = ""
        self.seconds = ONE_USER if settings.user_claims else LOOK_SECONDS  # for one look

    def add(self, device: Device) -> None:
        """Know one device more; what was seen before did not look for it."""
        name = device.id.partition(SHARE)[0]
        self.ids.add(name)
        for key in device_node_keys(device, self._dev_root, self._driver_root):
            self._keys.setdefault(key, []).append(name)
        self._answers.clear()

    def pids_with_open(self, device: str, uid: "int | None" = None) -> list[int]:
        """Return the processes, services left out, that have a device's node open.

        Those of user `uid` (docs/hand-over.md, which processes keep a device), or anybody's. Of a
        share it is the card's.
        """
        return self.users_by_device(uid)[0].get(device.partition(SHARE)[0], [])

    def may_open(self, held: str, device: str) -> bool:
        """Return whether a claim that holds device `held` may have `device` open as well.

        Without a device cgroup, CUDA opens every node it can see. With one, a claim opens its own
        card alone: a descriptor of another card was passed to it, and outlives its job.
        """
        return not self._isolated or card_bus_id(held) == card_bus_id(device)

    def users_by_device(self, uid: "int | None") -> tuple[dict[str, list[int]], str]:
        """Return the processes of a user, or of all, by device, and why there may be more.

        Each look is taken once. Of a share the device is its card.
        """
        if uid not in self._answers:
            pids: dict[str, list[int]] = {}
            blind = ""
            if self._keys and (uid is None or self.scan.may_run(uid)):
                blind = SEALED if self.scan.scan_closed else self._fill(pids, uid)
            # one that was read again stands there twice
            self._answers[uid] = {name: [*dict.fromkeys(pids[name])] for name in pids}, blind
            self.blind = self.blind or self.devices_unknown or blind
        pids, blind = self._answers[uid]
        return pids, self.devices_unknown or blind

    def _fill(self, users: dict[str, list[int]], uid: "int | None") -> str:
        """Look at every process as ProcessScan does: list again until nothing vanished unread.

        Where that look is not taken yet, both share their listings. One that may not be seen is
        tried again: a fork is hidden by its parent until its exec. Returns why there may be more.
        """
        scan, hidden, settled = self.scan, list[int](), False
        pids = [] if scan.complete else scan.list_new()
        self._late = time.monotonic() + self.seconds  # statuses have a limit of their own
        pids = [*dict.fromkeys([*scan.seen, *pids])]  # a look at another user's may have begun it
        for attempt in range(ROUNDS):
            try:
                settled, hidden = self._fill_from(pids, users, uid)
            except TimeoutError as fault:
                return str(fault) if uid is None else too_much_of(uid)
            if settled and scan.complete and attempt > 0:
                break
            if hidden:
                time.sleep(PAUSE * 2 ** min(attempt, 6))
            pids = [*hidden, *[pid for pid in scan.list_new() if pid not in hidden]]
        if hidden:
            return f"the files of process {hidden[0]} cannot be seen"
        if (settled and not scan.never_settled) or (uid is not None and not scan.may_fork(uid)):
            return scan.why_blind_about(uid)
        return "processes came and went faster than their files could be read"

    def _fill_from(
        self, pids: list[int], users: dict[str, list[int]], uid: "int | None"
    ) -> tuple[bool, list[int]]:
        """Look at these processes; return whether each was seen to the end, and who hides.

        Raises TimeoutError for one that has too many files open.
        """
        settled, hidden = True, list[int]()
        for pid in pids:
            try:
                for device in self._opened_by(pid, uid):
                    users.setdefault(device, []).append(pid)
            except TimeoutError as fault:
                why = f"process {pid} has more files open than can be looked at in time"
                raise TimeoutError(why) from fault
            except (FileNotFoundError, ProcessLookupError):
                settled = False
            except (OSError, ValueError):
                # init was there before any job, and may hide its files even from root
                if pid != INIT and os.geteuid() in (0, self._uid(pid)):
                    settled = False
                    if not self.scan.has_ended(pid):  # then it is hidden, unless root asks
                        hidden.append(pid)
        return settled, hidden

    def _uid(self, pid: int) -> int:
        """Return the user of a process, of a subordinate uid its user; -1 of one that is gone."""
        try:
            return self.scan.account(pid, self.scan.status(pid).uids[0])
        except (OSError, ValueError):
            return -1

    def _opened_by(self, pid: int, uid: "int | None") -> "Iterator[str]":
        """Yield the devices that a process of `uid` (None: anybody) has open, unless a service.

        Raises OSError, at the end where a thread vanished: another may have its files by now.
        """
        held: set[str] = set()
        if uid is not None and not self.scan.is_process_of(pid, uid):
            return
        status, proc = self.scan.status(pid), self.scan.proc
        over = status.state in OVER
        if (status.kernel and proc.kthreadd) or (over and proc.finished(pid)):
            return
        folder = f"{proc.root}/{pid}"
        exact = uid is not None
        self._add_open(pid, f"{folder}/fd", held, exact)
        seen, vanished = {str(pid)}, ""
        while threads := list_own_tables(proc.root, pid, over, seen):
            if time.monotonic() > self._late:
                raise TimeoutError(folder)
            for thread in threads:
                try:
                    self._add_open(pid, f"{folder}/task/{thread}/fd", held, exact)
                except (FileNotFoundError, ProcessLookupError):
                    vanished = thread
        if held:
            from gpulock.alloc.process_owner import is_service_process

            if is_service_process(pid, self.scan, self._services):
                return
        yield from held
        if vanished:
            raise OSError(errno.EAGAIN, "a thread ended before its files were read", vanished)

    def _is_node_name(self, path: str) -> bool:
        """Return whether a path is one that a device's node usually has.

        `/nvidia0` is how a container's own /dev shows from outside.
        """
        if path.startswith(("/nvidia", *self._simulated)):
            return True
        return path.startswith("/dev/") and not path.startswith(COMMON)

    def _add_open(self, pid: int, folder: str, held: set[str], exact: bool) -> None:
        """Add the devices open in one table of files.

        With `exact` every file is asked for its device number. A look at everybody's, which is for
        people, asks those whose path is a node's: it costs a tenth.
        """
        for number, fd in enumerate(os.listdir(folder)):
            if number % OFTEN == 0 and time.monotonic() > self._late:
                raise TimeoutError(folder)
            try:
                try:
                    link = os.readlink(f"{folder}/{fd}")
                except OSError as fault:
                    if fault.errno != errno.ENAMETOOLONG:
                        raise
                    # no call returns a path of more than a page (d_path(9)): any user can have
                    # such a file open, and it says nothing about what the file is
                    link = LONG_PATH
                # A socket, pipe or anonymous file has no path. The path of a file proves nothing: a
                # user binds a node to any (unshare -Urm), a container has its own /dev.
                if not link.startswith("/") or not (exact or self._is_node_name(link)):
                    continue
                if self._mounts is None:
                    from gpulock.node.mounts import Mounts  # most processes have no such file

                    self._mounts = Mounts(self.scan.proc.root)
                key = self._mounts.key(pid, folder, fd)
            except FileNotFoundError:
                continue
            if time.monotonic() > self._late:
                raise TimeoutError(folder)
            if key is not None:
                held.update(self._keys.get(key, ()))


def remaining_device_user(
    device: str, record: Owner, files: OpenFiles, held: dict[str, Lock]
) -> "tuple[str, str]":
    """Return which process of a lock's owner has its device open, and why not all could be seen.

    Both are clauses, empty where there is nothing to say.
    Processes of other claims in `held` that may have the device open do not keep this lock. Another
    user's without a claim are foreign. The MPS of a shared card is gpulockd's to end, and the card
    is closed until then (job.mps).
    """
    users, blind = files.users_by_device(record.uid)
    pids = users.get(device.partition(SHARE)[0], [])
    mark = held[device].mps if device in held else ""
    if mark and pids:
        from gpulock.alloc.process_owner import is_mps_process

        pids = [pid for pid in pids if not is_mps_process(pid, mark, files.scan)]
    others = [lock for lock in held.values() if files.may_open(lock.id, device)]
    left = unclaimed_processes(pids, files.scan, others, record) if pids else []
    return f"process {left[0]} has {device} open" if left else "", blind


def unclaimed_processes(
    pids: list[int], scan: ProcessScan, locks: "Iterable[Lock]", record: Owner
) -> list[int]:
    """Return the processes that are not proven to be of another claim than `record`."""
    from gpulock.alloc.process_owner import belongs_to_other_claim

    def is_claimed(pid: int, lock: Lock) -> bool:
        try:
            return belongs_to_other_claim(pid, lock, record, scan)
        except (OSError, ValueError):
            return False

    return [pid for pid in pids if not any([is_claimed(pid, lock) for lock in locks])]
