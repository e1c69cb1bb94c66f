# SPDX-License-Identifier: Apache-2.0
"""Whose processes keep a lock: its owner's alone. Another user's are foreign and keep none."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.alloc import device_users, pid_numbers, process_scan
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan, may_have_subordinate_uids
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.locks import Lock
from tests.support.pairs import zip_equal
from tests.support.trees import FakeProc, record

OWNER, OTHER, SUBORDINATE = 61_001, 61_002, 3_000_005
DEVICE = "0000:3b:00.0"
MINOR = 7
CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


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
    return device_users.remaining_device_user(DEVICE, mine, files, held if other else {})


def left(fake: FakeProc, **other: object) -> str:
    return ask(Proc(str(fake.root)), **other)  # type: ignore[arg-type]


FULL = {9: Path("/dev/full")}


@pytest.mark.parametrize("restrict", [True, False])
def test_another_users_process_of_no_claim_keeps_no_lock(fake: FakeProc, restrict: bool) -> None:
    fake.add(700, uids=(OTHER,) * 4, fds=FULL)
    fake.add(701, uids=(0,) * 4, fds=FULL)
    assert left(fake, restrict=restrict) == ""


@pytest.mark.parametrize(
    "uids", [(OWNER,) * 4, (OWNER, 0, 0, 0), (OWNER, 6, 6, 6), (0, 0, OWNER, 0), (0, OWNER, 0, 0)]
)
def test_a_process_with_any_uid_of_the_owner_keeps_it(
    fake: FakeProc, uids: tuple[int, ...]
) -> None:
    fake.add(700, uids=uids, fds=FULL)
    assert left(fake) == f"process 700 has {DEVICE} open"


def test_a_process_of_the_owner_that_is_of_another_claim_keeps_none(fake: FakeProc) -> None:
    fake.add(700, uids=(OWNER,) * 4, groups=[65_499], fds=FULL)
    assert left(fake, add_grp_id=65_499) == ""
    assert left(fake, add_grp_id=65_498) != ""


@pytest.mark.parametrize("groups", [[], [65_497]], ids=["a login", "a job without GPUs"])
def test_a_process_of_the_owner_that_is_of_no_claim_keeps_it_until_it_ends(
    fake: FakeProc, groups: list[int]
) -> None:
    fake.add(700, uids=(OWNER,) * 4, groups=groups, fds=FULL)
    assert left(fake, add_grp_id=65_499) == f"process 700 has {DEVICE} open"
    fake.remove(700)
    assert left(fake, add_grp_id=65_499) == ""


def refuse(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    """Let the kernel hide the files of these processes."""
    real = os.listdir

    def guarded(path: str) -> list[str]:
        if path.endswith(tuple(f"/{pid}/fd" for pid in pids)):
            raise PermissionError(13, "denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", guarded)


@pytest.mark.root
def test_who_hides_files_blinds_the_look_at_that_user_alone(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(700, uids=(OTHER,) * 4)
    fake.add(701, uids=(0,) * 4)
    refuse(monkeypatch, 700, 701)
    assert left(fake) == ""
    assert left(fake, uid=OTHER) == "the files of process 700 cannot be seen"


def test_who_has_too_many_files_open_blinds_the_look_at_that_user_alone(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(700, uids=(OTHER,) * 4, fds=FULL)
    monkeypatch.setattr(device_users, "LONGEST", -1.0)
    assert left(fake) == ""
    assert "process 700 has more files open" in left(fake, uid=OTHER)


def test_a_look_at_everybody_gives_no_user_more_than_a_share(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (600, 601, 700):
        fake.add(pid, uids=(OTHER if pid < 700 else OWNER,) * 4, fds=FULL)
    monkeypatch.setattr(device_users, "ONE_USER", 0.0)
    found, blind = openers(fake)
    assert found == [] and "more files open than can be looked at in time" in blind
    monkeypatch.setattr(device_users, "ONE_USER", 0.5)
    real, asked, clock = os.listdir, set[str](), [100.0]

    def slow(path: str) -> list[str]:
        if path.endswith("/fd"):
            asked.add(path.split("/")[-2])
            clock[0] += 0.3
        return real(path)

    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    fake.add(602, uids=(OTHER,) * 4, fds=FULL)
    found, blind = openers(fake)
    of_other = asked & {"600", "601", "602"}
    assert 700 in found and len(of_other) == 2
    assert "more files open than can be looked at in time" in blind


def openers(fake: FakeProc) -> tuple[list[int], str]:
    files = OpenFiles(ProcessScan(Proc(str(fake.root))), [full_device()], Settings({}))
    return files.pids_with_open(DEVICE), files.blind


class Restless(Proc):
    """A /proc in which a process of `uid` ends in each listing before it is read.

    So many new processes are met as their numbers are asked for.
    """

    def __init__(self, fake: FakeProc, uid: int, met: int = process_scan.SAMPLES) -> None:
        super().__init__(str(fake.root))
        fake.namespace("pid:[1]")  # where the last number is not this /proc's
        self._fake, self._uid, self._met = fake, uid, met
        self._next, self._last = 10_000, 20_000

    def pids(self) -> list[int]:
        self._next += 1
        return [*super().pids(), self._next]

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


@pytest.mark.usefixtures("unhurried")
def test_a_restless_scan_is_blind_about_a_group_that_a_new_process_carries(fake: FakeProc) -> None:
    scan = ProcessScan(Restless(fake, OTHER))
    scan.statuses()
    assert scan.blind and scan.why_blind_about(-1, 65_400) == ""
    again = ProcessScan(Restless(fake, OTHER))
    again.statuses()
    fake.add(20_063, uids=(OTHER,) * 4, groups=[65_400])
    fake_add = fake.add
    fake.add = lambda pid, *_, **__: pid if pid == 20_063 else fake_add(pid)  # type: ignore[method-assign]
    assert "faster" in again.why_blind_about(-1, 65_400)


@pytest.mark.usefixtures("unhurried")
def test_what_a_scheduler_could_not_see_is_not_taken_for_restlessness(fake: FakeProc) -> None:
    scan = ProcessScan(Restless(fake, OTHER))
    scan.statuses()
    assert scan.why_blind_about(OWNER) == ""
    scan.mark_blind("process 5 hangs")
    assert scan.why_blind_about(OWNER) == "process 5 hangs"


class Listed(Proc):
    """A /proc that counts how often it is listed, and changes right after each time."""

    def __init__(self, fake: FakeProc, *changes: Callable[[], object]) -> None:
        super().__init__(str(fake.root))
        self.times, self._changes = 0, iter(changes)

    def pids(self) -> list[int]:
        found = super().pids()
        self.times += 1
        next(self._changes, list)()
        return found


@pytest.mark.parametrize("restrict", [True, False])
def test_one_look_at_processes_and_files_lists_everybody_twice(
    fake: FakeProc, restrict: bool
) -> None:
    fake.add(700, uids=(OWNER,) * 4)
    fake.add(701, uids=(OTHER,) * 4)
    proc = Listed(fake)
    assert ask(proc, restrict=restrict) == "" and proc.times == 2


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


class Numbered(Listed):
    """A /proc that tells the pid given last: each of these in turn, the last one from then on."""

    def __init__(self, fake: FakeProc, *given: int | Callable[[], int]) -> None:
        super().__init__(fake)
        (fake.root / "sys/kernel/pid_max").write_text("32768\n")
        (fake.root / "loadavg").write_text("0.00 0.01 0.05 2/300 900\n")
        self._given = list(given)

    def last_pid(self) -> int:
        one = self._given.pop(0) if len(self._given) > 1 else self._given[0]
        return one if isinstance(one, int) else one()


def comes(fake: FakeProc, pid: int, last: int, goes: int = 0) -> Callable[[], int]:
    """Let a process of the owner come with the device, and another go, as the number is asked."""

    def change() -> int:
        fake.add(pid, uids=(OWNER,) * 4, fds=FULL)
        if goes:
            fake.remove(goes)
        return last

    return change


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no look take long, however busy the machine is."""
    monkeypatch.setattr(pid_numbers, "RATE", 1.0)
    monkeypatch.setattr(process_scan, "SAMPLING", 3600.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("comes_as", "last", "times"),
    [
        (901, 901, 1),
        (1900, 1900, 1),
        (899, 900, 1),  # it was being made as the first number was asked
        (645, 900, 1),
        (640, 900, 1),  # too old to have been in the making: it is not asked for
        (2000, 2000, 2),  # so many numbers that to list is cheaper
        (5, 5, 2),  # they came round
        (400, 899, 2),
    ],
)
def test_who_began_since_the_listing_is_asked_for_by_number(
    fake: FakeProc, comes_as: int, last: int, times: int
) -> None:
    proc = Numbered(fake, 900, comes(fake, comes_as, last), last)
    found = "" if comes_as == 640 else f"process {comes_as} has {DEVICE} open"
    assert (ask(proc), proc.times) == (found, times)


def given_again(fake: FakeProc, whose: int, pid: int, last: int) -> Callable[[], int]:
    """Let a process be there, and its number the owner's, with the device, as it is asked."""
    fake.add(pid, uids=(whose,) * 4)
    if whose != OWNER:
        os.chown(fake.root / str(pid), whose, whose)  # as the kernel makes its folder

    def change() -> int:
        fake.remove(pid)
        fake.add(pid, uids=(OWNER,) * 4, fds=FULL)
        return last

    return change


@pytest.mark.root
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("whose", [OWNER, OTHER])
@pytest.mark.parametrize("last", [5, 950, 3000])  # come round, asked one by one, or too many
def test_a_number_that_was_given_again_is_read_again(fake: FakeProc, whose: int, last: int) -> None:
    again = given_again(fake, whose, 701 if last == 5 else 905, last)
    number = 701 if last == 5 else 905
    assert ask(Numbered(fake, 900, again, last)) == f"process {number} has {DEVICE} open"


@pytest.mark.root
@pytest.mark.parametrize("whose", [OWNER, OTHER])
@pytest.mark.parametrize("why", ["late", "namespace", "untold"])
def test_where_any_number_may_be_given_again_all_are_read_again(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch, whose: int, why: str
) -> None:
    again = given_again(fake, whose, 701, 900)
    if why == "late":
        monkeypatch.setattr(pid_numbers, "RATE", -1.0)  # numbers a second
    if why == "namespace":
        fake.namespace("pid:[1]")
    proc = Numbered(fake, 900)
    if why == "untold":
        (fake.root / "sys/kernel/pid_max").unlink()
    listed = Listed.pids

    def pids(self: Listed) -> list[int]:
        if self.times == 1:
            again()
        return listed(self)

    monkeypatch.setattr(Listed, "pids", pids)
    assert ask(proc) == f"process 701 has {DEVICE} open"


def test_processes_of_root_that_end_one_after_the_other_do_not_keep_a_look_going(
    fake: FakeProc,
) -> None:
    """Where any number may be given again: on a busy node one ends in each listing."""

    def end(pid: int) -> Callable[[], None]:
        return lambda: fake.remove(pid)

    many = [fake.add(pid, uids=(0,) * 4) for pid in range(700, 700 + 2 * process_scan.ROUNDS)]
    fake.namespace("pid:[1]")
    proc = Listed(fake, *map(end, many))
    assert (ask(proc), proc.times) == ("", 3)


@pytest.mark.usefixtures("unhurried")
def test_after_a_look_at_processes_one_at_files_reads_a_number_that_was_given_again(
    fake: FakeProc,
) -> None:
    again = given_again(fake, OWNER, 905, 950)
    scan = ProcessScan(Numbered(fake, 900, 900, 900, again, 950))
    scan.statuses()
    assert scan.complete
    files = OpenFiles(scan, [full_device()], Settings({}))
    assert files.pids_with_open(DEVICE, OWNER) == [905]


@pytest.mark.usefixtures("unhurried")
def test_a_process_that_is_read_again_is_told_once(fake: FakeProc) -> None:
    fake.add(905)
    (fake.root / "905/fd").rename(fake.root / "905/gone")  # so it is listed again and again
    proc = Numbered(fake, 900, 900, comes(fake, 910, 910), 910)
    files = OpenFiles(ProcessScan(proc), [full_device()], Settings({}))
    assert files.pids_with_open(DEVICE) == [910]


@pytest.mark.usefixtures("unhurried")
def test_of_a_process_that_ended_before_it_was_read_again_the_status_stays(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: Proc, pid: int) -> bool:
        fake.remove(pid)
        return True

    fake.add(905, uids=(OWNER,) * 4)
    monkeypatch.setattr(Proc, "leads", end)
    scan = ProcessScan(Numbered(fake, 900, 900, 905))
    assert 905 in scan.statuses()
    assert not (fake.root / "905").exists() and scan.status(905).uids[0] == OWNER


@pytest.mark.usefixtures("unhurried")
def test_a_process_in_the_making_is_found_below_the_numbers_of_many_others(fake: FakeProc) -> None:
    for pid in range(500, 901):
        fake.add(pid, uids=(0,) * 4)
    assert ask(Numbered(fake, 900, comes(fake, 499, 900), 900)) == f"process 499 has {DEVICE} open"


@pytest.mark.usefixtures("unhurried")
def test_threads_that_end_during_a_look_do_not_make_it_longer(fake: FakeProc) -> None:
    def end() -> int:
        (fake.root / "loadavg").write_text("0.00 0.01 0.05 2/300 900\n")
        return 900

    proc = Numbered(fake, 900, end, 900)
    (fake.root / "loadavg").write_text("0.00 0.01 0.05 2/10923 900\n")
    assert (ask(proc), proc.times) == ("", 2)


@pytest.mark.usefixtures("unhurried")
def test_numbers_of_forks_that_failed_hide_nobody_who_forks(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user burns numbers, of which no process comes (docs/facts/locking.md)."""
    monkeypatch.setattr(process_scan, "SAMPLING", 5.0)
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    for pid in range(21_000, 21_000 + process_scan.ENOUGH):
        fake.add(pid, uids=(OTHER,) * 4)
    scan = ProcessScan(Numbered(fake, 20_900, 21_500))
    assert scan.may_fork(OTHER) and not scan.may_fork(OWNER)


def test_the_kernel_tells_how_many_numbers_are_to_be_given() -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert Proc().free_pids() < most - 300 - 3 * len(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("unhurried")
def test_who_forks_and_ends_as_its_number_is_asked_is_found_by_its_childs(fake: FakeProc) -> None:
    hops = [comes(fake, pid + 1, pid + 1, goes=pid) for pid in range(901, 905)]
    proc = Numbered(fake, 900, comes(fake, 901, 901), *hops, 905)
    assert (ask(proc), proc.times) == (f"process 905 has {DEVICE} open", 1)


@pytest.mark.parametrize("why", ["late", "taken", "namespace", "untold", "unbounded"])
def test_where_numbers_prove_nothing_everybody_is_listed_again(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "late":
        monkeypatch.setattr(pid_numbers, "RATE", -1.0)  # numbers a second
    if why == "namespace":
        fake.namespace("pid:[1]")
    proc = Numbered(fake, 900, 900) if why != "untold" else Listed(fake)
    if why == "taken":  # each of 10,923 threads may keep three of 32,768 numbers
        monkeypatch.setattr(pid_numbers, "RATE", 1.0)
        (fake.root / "loadavg").write_text("0.00 0.01 0.05 2/10923 900\n")
    if why == "unbounded":
        (fake.root / "sys/kernel/pid_max").unlink()
    assert (ask(proc), proc.times) == ("", 2)


@pytest.mark.usefixtures("unhurried")
def test_the_number_of_a_thread_is_no_process(fake: FakeProc) -> None:
    status = fake.root / str(fake.add(901, groups=[65_400])) / "status"
    status.write_bytes(status.read_bytes() + b"Tgid:\t700\n")
    proc = Numbered(fake, 900, 901)
    scan = ProcessScan(Listed(fake))
    assert scan.carriers(65_400) == [901]
    proc.pids = lambda: []  # type: ignore[method-assign]
    assert ProcessScan(proc).carriers(65_400) == []


def test_the_kernel_tells_numbers_upwards_and_which_are_threads() -> None:
    proc = Proc()
    thread = threading.Thread(target=(go := threading.Event()).wait)
    thread.start()
    assert thread.native_id is not None
    assert proc.leads(os.getpid()) and not proc.leads(thread.native_id)
    go.set()
    thread.join()


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
    assert may_have_subordinate_uids(OWNER, "owner", *map(str, paths)) is may
    if subuid:
        assert may_have_subordinate_uids(OWNER, "", *map(str, paths))


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
    ("effective", "dumpable"), [(OWNER, True), (OWNER, False), (0, True), (0, False), (6, False)]
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
        def pids(self) -> list[int]:
            found = super().pids()
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
        process_scan.may_have_subordinate_uids,
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
        (folder / "uid_map").write_text(f"0 {OWNER} 1\n1 3000001 100\n")
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
    monkeypatch.setattr(process_scan, "may_have_subordinate_uids", no_subordinates)
    assert ask(Proc()) == ""


def refuse_to_list(_: Proc) -> list[int]:
    pytest.fail("everybody is listed")


@pytest.mark.root
def test_where_the_owner_has_no_process_only_what_is_near_the_shepherd_is_looked_at(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "may_have_subordinate_uids", no_subordinates)

    def scan(shepherd: int | None) -> ProcessScan:
        found = ProcessScan(Proc())
        found.restrict({OWNER: "owner"}, shepherd)
        return found

    marked = start(lambda: os.setgroups([65_400]))  # root's, as of a sudo that keeps groups
    start(lambda: become(OTHER, OTHER))
    listed = scan(0).carriers(65_400)
    monkeypatch.setattr(Proc, "pids", refuse_to_list)
    assert scan(os.getpid()).carriers(65_400) == [marked] == listed
    assert scan(os.getppid()).carriers(65_400) == []  # of another job: no child of its shepherd
    assert scan(None).statuses() == {}


@pytest.mark.root
def test_a_process_whose_parents_ended_is_near_the_shepherd(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "may_have_subordinate_uids", no_subordinates)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ready, told = os.pipe()

    def leave() -> None:
        os.setgroups([65_400])
        if not os.fork():
            os.write(told, b"%d" % os.getpid())
            signal.pause()

    parent = start(leave)
    child = int(os.read(ready, 16))
    for fd in (ready, told):
        os.close(fd)
    os.kill(parent, signal.SIGKILL)
    os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
    scan = ProcessScan(Proc())
    scan.restrict({OWNER: "owner"}, os.getpid())
    assert scan.carriers(65_400) == [child]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
