# SPDX-License-Identifier: Apache-2.0
"""Whose processes keep a lock: its owner's alone. Another user's are foreign and keep none."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.alloc import device_users, process_scan
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_reader import too_much_of
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node import subordinate
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.locks import Lock
from tests.support.pairs import zip_equal
from tests.support.trees import FakeProc, record

ROOT = Path(__file__).resolve().parents[3]
# whose processes are asked for on this machine: no other process of pytest starts some of them
OWNER = 1_000_000 + 4 * os.getpid()
OTHER, SUBORDINATE = OWNER + 1, OWNER + 100_000_000
DEVICE = "0000:3b:00.0"
MINOR = 7
CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4


def full_device() -> Device:
    """Return a GPU that is what /dev/full is to the kernel: 1, 7."""
    device = Device(DEVICE, 0)
    device.minor = MINOR
    return device


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    monkeypatch.setattr(device_users, "MAJOR", 1)
    return FakeProc(tmp_path / "proc")


def ask(proc: Proc, uid: int = OWNER, restrict: bool = True, **other: object) -> str:
    """Return what keeps the owner's lock, beside another claim with these fields."""
    scan = ProcessScan(proc)
    if restrict:
        scan.restrict({uid: "owner"})
    files = OpenFiles(scan, [full_device()], Settings({}))
    held = {"0000:af:00.0": Lock("0000:af:00.0", record(token="other", **other), "")}
    mine = record(uid=uid, add_grp_id=65_400)
    left, unseen = device_users.remaining_device_user(DEVICE, mine, files, held if other else {})
    return left or unseen


def left(fake: FakeProc, **other: object) -> str:
    return ask(Proc(str(fake.root)), **other)  # type: ignore[arg-type]


FULL = {9: Path("/dev/full")}


@pytest.mark.parametrize("restrict", [True, False])
def test_another_users_process_of_no_claim_keeps_no_lock(fake: FakeProc, restrict: bool) -> None:
    fake.add(700, uids=(OTHER,) * 4, fds=FULL)
    fake.add(701, uids=(0,) * 4, fds=FULL)
    assert left(fake, restrict=restrict) == ""


def test_who_has_too_many_files_open_blinds_the_look_at_that_user_alone(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(700, uids=(OTHER,) * 4, fds=FULL)
    monkeypatch.setattr(device_users, "LOOK_SECONDS", -1.0)
    assert left(fake) == ""
    assert left(fake, uid=OTHER) == too_much_of(OTHER)


class Restless(Proc):
    """A /proc in which a process of `uid` ends in each listing before it is read.

    So many new processes are met as their numbers are asked for.
    """

    def __init__(self, fake: FakeProc, uid: int, met: int = process_scan.SAMPLES) -> None:
        super().__init__(str(fake.root))
        fake.namespace("pid:[1]")  # where the last number is not this /proc's
        self._fake, self._uid, self._met = fake, uid, met
        self._next, self._last = 10_000, 20_000

    def inodes(self) -> dict[int, int]:
        self._next += 1
        return {**super().inodes(), self._next: 0}

    def last_pid(self) -> int:
        if self._last > 20_000 + self._met:
            raise OSError(5, "no more")
        self._last += 1
        return self._fake.add(self._last - 1, uids=(self._uid,) * 4)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("restrict", [True, False])
def test_who_forks_all_the_time_blinds_the_look_at_that_user_alone(
    fake: FakeProc, restrict: bool
) -> None:
    faster = "processes came and went faster than their files could be read"
    assert ask(Restless(fake, OTHER), restrict=restrict) == ""
    assert ask(Restless(fake, OWNER), restrict=restrict) == faster
    assert ask(Restless(fake, OTHER, process_scan.ENOUGH - 1), restrict=restrict) == faster
    everybody = OpenFiles(ProcessScan(Restless(fake, OTHER)), [full_device()], Settings({}))
    assert everybody.users_by_device(None)[1] == faster


class Listed(Proc):
    """A /proc that counts how often it is listed, and changes right after each time.

    With `once_read` it changes before the second time: what the first one has listed was read.
    """

    def __init__(
        self,
        fake: FakeProc,
        *changes: Callable[[], object],
        once_read: Callable[[], object] = list,
    ) -> None:
        super().__init__(str(fake.root))
        self.times, self._changes, self._once_read = 0, iter(changes), once_read

    def inodes(self) -> dict[int, int]:
        if self.times == 1:
            self._once_read()
        found = super().inodes()
        self.times += 1
        next(self._changes, list)()
        return found


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_who_forks_and_ends_before_each_read_is_found_by_the_listing_after(
    fake: FakeProc, hops: int
) -> None:
    def hop(pid: int) -> Callable[[], None]:
        def change() -> None:
            fake.remove(pid)
            fake.add(pid + 1, uids=(OWNER,) * 4, fds=FULL)

        return change

    fake.add(700, uids=(OWNER,) * 4, fds=FULL)
    proc = Listed(fake, *map(hop, range(700, 700 + hops)))
    assert ask(proc) == f"process {700 + hops} has {DEVICE} open" and proc.times == hops + 1


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no look take long, however busy the machine is."""
    monkeypatch.setattr(process_scan, "SAMPLING", 3600.0)


def given_again(fake: FakeProc, whose: int, pid: int) -> Callable[[], None]:
    """Let a process be there, and its number the owner's, with the device, some time later."""
    fake.add(pid, uids=(whose,) * 4)
    if whose != OWNER:
        os.chown(fake.root / str(pid), whose, whose)  # as the kernel makes its folder

    def change() -> None:
        (fake.root / str(pid)).rename(fake.root / "gone")  # so that its inode stays taken
        fake.add(pid, uids=(OWNER,) * 4, fds=FULL)

    return change


@pytest.mark.root
@pytest.mark.parametrize("whose", [OWNER, OTHER], ids=["the owner's", "another's"])
def test_a_number_that_was_given_again_is_read_again(fake: FakeProc, whose: int) -> None:
    proc = Listed(fake, once_read=given_again(fake, whose, 701))
    assert ask(proc) == f"process 701 has {DEVICE} open"


def test_processes_of_root_that_end_one_after_the_other_do_not_keep_a_look_going(
    fake: FakeProc,
) -> None:
    """On a busy node one ends in each listing."""

    def end(pid: int) -> Callable[[], None]:
        return lambda: fake.remove(pid)

    many = [fake.add(pid, uids=(0,) * 4) for pid in range(700, 700 + 2 * process_scan.ROUNDS)]
    proc = Listed(fake, *map(end, many))
    assert (ask(proc), proc.times) == ("", 2)


def test_after_a_look_at_processes_one_at_files_reads_a_number_that_was_given_again(
    fake: FakeProc,
) -> None:
    again = given_again(fake, OWNER, 905)
    scan = ProcessScan(Proc(str(fake.root)))
    scan.statuses()
    assert scan.complete
    files = OpenFiles(scan, [full_device()], Settings({}))
    again()
    assert files.pids_with_open(DEVICE, OWNER) == [905]


def test_a_number_of_the_kernels_own_that_came_to_a_process_hides_nobody(fake: FakeProc) -> None:
    """The thread ended before the listing, and its number is a process's of the owner by then."""
    kernel_thread = fake.add(2, "kthreadd", ppid=0, uids=(0,) * 4)
    status = fake.root / str(kernel_thread) / "status"
    status.write_bytes(status.read_bytes().replace(b"VmSize", b"Other"))
    children = fake.root / "2/task/2/children"
    children.write_text("701")
    proc = Listed(fake, lambda: children.write_text(""))
    fake.add(701, uids=(OWNER,) * 4, fds=FULL)
    assert ask(proc) == f"process 701 has {DEVICE} open"


@pytest.mark.usefixtures("unhurried")
def test_numbers_of_forks_that_failed_hide_nobody_who_forks(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user burns numbers, of which no process comes (docs/facts/locking.md)."""
    monkeypatch.setattr(process_scan, "SAMPLING", 5.0)
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 1000)
    for pid in range(21_000, 21_000 + process_scan.ENOUGH):
        fake.add(pid, uids=(OTHER,) * 4)
    given = iter([20_900])
    monkeypatch.setattr(Proc, "last_pid", lambda _: next(given, 21_500))
    scan = ProcessScan(Proc(str(fake.root)))
    assert scan.may_fork(OTHER) and not scan.may_fork(OWNER)


GIVEN_AGAIN = """
import os, signal
from gpulock.node.procfs import Proc
for _ in range(3):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write("99")
    pid = os.fork()
    if not pid:
        signal.pause()
    inode = Proc().inodes()[pid]
    assert Proc().inodes()[pid] == inode
    print(pid, inode)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@pytest.mark.root
def test_the_kernel_gives_the_folder_of_a_number_that_is_given_again_another_inode() -> None:
    """In a pid namespace of its own, where nobody else is given the number meanwhile."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", GIVEN_AGAIN]
    done = subprocess.run(alone, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    numbers, inodes = zip_equal(*[line.split() for line in done.stdout.splitlines()])
    assert set(numbers) == {"100"}
    assert len(set(inodes)) == 3


@pytest.mark.root  # as the kernel makes the folder of such a process
def test_a_process_that_cannot_be_seen_blinds_the_look_at_files_too(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(700, uids=(OWNER,) * 4, fds=FULL)
    (fake.root / "700/status").write_text("garbage")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert left(fake) == "the files of process 700 cannot be seen"


@pytest.mark.parametrize(
    ("subuid", "nsswitch", "may"),
    [
        (None, None, False),
        ("alice:100000:65536\n", None, False),
        ("alice:100000:65536\nowner:165536:65536\n", None, True),
        ("61001:165536:65536\n", "subuids: x\n", True),
        ("owners:165536:65536\n", "passwd: files\nsubid: sss\n", True),
        ("owners:165536:65536\n", "passwd: files\n", False),
    ],
)
def test_who_may_have_subordinate_uids(
    tmp_path: Path, subuid: str | None, nsswitch: str | None, may: bool
) -> None:
    paths = tmp_path / "subuid", tmp_path / "nsswitch.conf"
    for path, text in zip_equal(paths, (subuid, nsswitch)):
        if text is not None:
            path.write_text(text)
    assert subordinate.may_have_subordinate_uids(61_001, "owner", *map(str, paths)) is may
    if subuid:
        assert subordinate.may_have_subordinate_uids(61_001, "", *map(str, paths))


Start = Callable[[Callable[[], object]], int]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process that has the device open, and does something first."""
    monkeypatch.setattr(device_users, "MAJOR", 1)
    pids: list[int] = []

    def run(first: Callable[[], object]) -> int:
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.open("/dev/full", os.O_RDWR)
                first()
                os.write(told, b"x")
                signal.pause()
            finally:
                os._exit(1)
        pids.append(pid)
        os.close(told)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return pid

    yield run
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(real: int, effective: int, dumpable: bool = True) -> None:
    os.setresgid(65_534, 65_534, 65_534)
    os.setresuid(real, effective, effective)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def unshare() -> None:
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
        os._exit(2)


@pytest.mark.root
@pytest.mark.parametrize("restrict", [True, False])
def test_a_real_process_of_another_user_keeps_no_lock(start: Start, restrict: bool) -> None:
    start(lambda: become(OTHER, OTHER))
    start(lambda: None)  # root's own
    assert ask(Proc(), restrict=restrict) == ""


@pytest.mark.root
@pytest.mark.parametrize("restrict", [True, False])
@pytest.mark.parametrize(
    ("effective", "dumpable"),
    [(OWNER, True), (OWNER, False), (0, True), (0, False), (6, False)],
    ids=["own", "own, hidden", "root's", "root's, hidden", "a service's, hidden"],
)
def test_a_real_process_of_the_owner_keeps_it(
    start: Start, effective: int, dumpable: bool, restrict: bool
) -> None:
    """Also one that runs a setuid program, and one whose files show as root's in /proc."""
    pid = start(lambda: become(OWNER, effective, dumpable))
    assert ask(Proc(), restrict=restrict) == f"process {pid} has {DEVICE} open"


def become_owner_without_device() -> None:
    become(OWNER, OWNER)
    for fd in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{fd}") == "/dev/full":
            os.close(int(fd))


@pytest.mark.root
def test_a_program_that_is_setuid_to_another_ordinary_user_keeps_no_lock_at_the_jobs_end(
    start: Start,
) -> None:
    """docs/security.md, what is not defended; a look at everybody knows its real uid."""
    pid = start(lambda: become(OWNER, OTHER))
    assert ask(Proc()) == ""
    assert ask(Proc(), restrict=False) == f"process {pid} has {DEVICE} open"


@pytest.mark.root
@pytest.mark.usefixtures("unhurried")
def test_a_real_process_that_began_after_the_listing_is_found(start: Start) -> None:
    start(become_owner_without_device)
    begun: list[int] = []

    class Late(Proc):
        def inodes(self) -> dict[int, int]:
            found = super().inodes()
            if not begun:
                begun.append(start(lambda: become(OWNER, OWNER)))
            return found

    assert ask(Late()) == f"process {begun[0]} has {DEVICE} open"


@pytest.mark.root
@pytest.mark.parametrize("restrict", [True, False])
def test_a_process_under_a_subordinate_uid_of_the_owner_keeps_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restrict: bool
) -> None:
    """As newuidmap makes it: in a namespace of the owner's, under a uid that nobody else has."""
    (tmp_path / "subuid").write_text("owner:3000000:65536\n")
    monkeypatch.setattr(
        subordinate.may_have_subordinate_uids,
        "__defaults__",
        (str(tmp_path / "subuid"), str(tmp_path / "none")),
    )
    ready, told = os.pipe()
    go, went = os.pipe()

    def enter() -> None:
        become(OWNER, OWNER)
        unshare()
        os.write(told, b"%d" % os.getpid())
        os.read(go, 1)
        os.setresuid(5, 5, 5)  # uid 5 in there
        unshare()  # a namespace within that namespace

    def map_ids() -> None:
        folder = Path(f"/proc/{int(os.read(ready, 16))}")
        (folder / "uid_map").write_text(f"0 {OWNER} 1\n5 {SUBORDINATE} 1\n")
        (folder / "gid_map").write_text("0 65534 1\n")
        os.write(went, b"x")

    thread = threading.Thread(target=map_ids)
    thread.start()
    pid = start(enter)
    thread.join()
    assert Proc().status(pid).uids[0] == SUBORDINATE
    with pytest.raises(ProcessLookupError):
        os.getpriority(os.PRIO_USER, OWNER)
    assert ask(Proc(), restrict=restrict) == f"process {pid} has {DEVICE} open"
    assert ask(Proc(), uid=OTHER, restrict=restrict) == ""


def no_subordinates(*_: object) -> bool:
    return False


@pytest.mark.root
def test_where_the_owner_has_no_process_no_file_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        pytest.fail("a look for nothing")

    monkeypatch.setattr(OpenFiles, "_fill", never)
    monkeypatch.setattr(subordinate, "may_have_subordinate_uids", no_subordinates)
    assert ask(Proc()) == ""


@pytest.mark.root
def test_where_the_owner_has_no_process_nobody_is_looked_at(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subordinate, "may_have_subordinate_uids", no_subordinates)
    start(lambda: os.setgroups([65_400]))
    scan = ProcessScan(Proc())
    scan.restrict({OWNER: "owner"})
    assert scan.statuses() == {}
