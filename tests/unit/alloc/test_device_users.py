# SPDX-License-Identifier: Apache-2.0
"""The last guard: who still has a device open, and whose processes are left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulock.alloc import device_users
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_reader import too_much_of
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node import file_tables
from gpulock.node.devices import Device
from gpulock.node.mounts import Mounts
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.locks import Lock
from tests.support.clock import VirtualClock
from tests.support.faults import fail_at
from tests.support.trees import FakeProc, record

SERVICES = ("nvidia-persistenced", "gpulock-exporter")
MINOR = 7
ROOT = (0, 0, 0, 0)


class Stage:
    """A /proc and one GPU whose node is `dev/nvidia7`."""

    def __init__(self, root: Path) -> None:
        self.fake = FakeProc(root / "proc")
        self.dev = root / "dev"
        self.dev.mkdir()
        self.node = self.dev / f"nvidia{MINOR}"
        self.node.touch()
        self.device = Device("0000:3b:00.0", 0)
        self.device.minor = MINOR
        self.settings = Settings(
            {"DEV_ROOT": str(self.dev), "ALLOWED_PROCESSES": " ".join(SERVICES)}
        )

    def holders(self, proc: Proc | None = None) -> OpenFiles:
        scan = ProcessScan(proc or Proc(str(self.fake.root)))
        return OpenFiles(scan, [self.device], self.settings)

    def who(self) -> list[int]:
        return self.holders().pids_with_open(self.device.id)

    def left(self, **other: object) -> str:
        """Ask for what is left of our job beside another claim with these fields."""
        held = {"0000:af:00.0": Lock("0000:af:00.0", record(token="other", **other), "")}
        left, unseen = device_users.remaining_device_user(
            self.device.id, record(), self.holders(), held if other else {}
        )
        return left or unseen


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def numbered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The device is what /dev/full is to the kernel: 1, 7. It has no node in DEV_ROOT."""
    monkeypatch.setattr(device_users, "MAJOR", 1)
    stage.node.unlink()
    return stage


def test_a_node_that_was_deleted_and_made_again_is_still_the_device(
    numbered: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link then reads `/dev/nvidia7 (deleted)`, and only its stat tells the number."""
    link = numbered.fake.root / "700/fd/9"
    numbered.fake.add(700, fds={9: numbered.dev / "nvidia7 (deleted)"})
    (numbered.dev / "nvidia7 (deleted)").symlink_to("/dev/full")
    numbered.node.symlink_to("/dev/full")
    assert "(deleted)" in os.readlink(link)
    assert numbered.who() == [700]


def test_a_device_that_is_added_after_a_look_is_looked_for_as_well(stage: Stage) -> None:
    """As of a card that fell off the bus: only a record tells its number."""
    stage.fake.add(700, fds={9: stage.node})
    files = OpenFiles(ProcessScan(Proc(str(stage.fake.root))), [Device("x", 1)], stage.settings)
    assert files.pids_with_open("x", 1000) == []
    files.add(stage.device)
    assert files.pids_with_open(stage.device.id, 1000) == [700]


def test_a_service_of_a_system_user_may_have_it_open(stage: Stage) -> None:
    stage.fake.add(700, SERVICES[0][:15], uids=(0,) * 4, fds={9: stage.node})
    assert stage.holders().pids_with_open(stage.device.id, 0) == stage.who() == []


def test_a_process_that_is_not_proven_to_be_another_claims_keeps_this_lock(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fake.add(700, fds={9: stage.node})
    (stage.fake.root / "700/environ").write_bytes(b"GPULOCK_CLAIM=other\0")
    theirs = {"scheduler": "process", "add_grp_id": 0}
    assert stage.left(**theirs) == ""
    fail_at(monkeypatch, "open", "/environ", PermissionError(13, "denied"))
    assert "700" in stage.left(**theirs)


@pytest.mark.parametrize("hidden", [("fd",), ("fd", "task")])
def test_a_process_whose_files_may_not_be_seen_keeps_every_lock_of_its_user(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 64_001)
    stage.fake.add(700, uids=(64_001, 1000, 1000, 1000))
    for name in hidden:
        fail_at(monkeypatch, "listdir", f"/700/{name}", PermissionError(13, "denied"))
    assert stage.who() == []
    assert "700" in stage.left()


def test_one_that_ended_since_it_was_listed_has_no_files_though_the_kernel_hides_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that nobody has asked for its exit code, as an ordinary user sees it."""
    uids = (os.geteuid(), 1000, 1000, 1000)
    stage.fake.add(700, uids=uids)
    real = os.listdir

    def ends(path: str) -> list[str]:
        if path.endswith("/700/fd"):
            stage.fake.add(700, state="Z", uids=uids)
            raise PermissionError(13, "denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", ends)
    assert stage.left() == ""


def test_init_alone_may_hide_its_files(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "listdir", "/1/fd", PermissionError(13, "denied"))
    assert stage.left() == ""


@pytest.mark.parametrize(("second", "held"), [("kthreadd", []), ("bash", [700])])
def test_a_thread_of_the_kernel_has_no_files(stage: Stage, second: str, held: list[int]) -> None:
    stage.fake.add(2, second, ppid=0, uids=ROOT)
    stage.fake.add(700, ppid=2, fds={9: stage.node})
    for pid in (2, 700):
        status = stage.fake.root / str(pid) / "status"
        status.write_bytes(status.read_bytes().replace(b"VmSize", b"Other"))
    assert stage.who() == held


def test_the_files_of_threads_count_when_the_leader_has_ended(stage: Stage) -> None:
    stage.fake.add(700, state="Z", threads={700: "Z", 701: "S"})
    (stage.fake.root / "700/task/701/fd/9").symlink_to(stage.node)
    assert stage.who() == [700]


def test_a_thread_that_ends_while_it_is_looked_at_hides_no_other(stage: Stage) -> None:
    stage.fake.add(700, state="Z", threads={700: "Z", 701: "S", 702: "S"})
    (stage.fake.root / "700/task/702/fd/9").symlink_to(stage.node)
    for thread in (700, 701):
        (stage.fake.root / f"700/task/{thread}/fd").rmdir()
    assert stage.who() == [700]


def test_the_clock_is_looked_at_before_each_file_that_may_be_a_node(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may cost what its owner wants, and fewer than one count of descriptors."""
    stage.fake.add(700, fds={number: stage.dev / "other" for number in range(3, 9)})
    (stage.dev / "other").touch()
    asked: list[str] = []

    def slow(_: object, pid: int, folder: str, fd: str) -> None:
        del pid, folder
        asked.append(fd)
        monkeypatch.setattr(time, "monotonic", lambda: float("inf"))

    monkeypatch.setattr(Mounts, "key", slow)
    assert "open files than can be looked at in time" in stage.left()
    assert len(asked) == 1


def test_a_path_too_long_to_be_told_hides_nothing_and_hinders_nobody(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    stage.fake.add(700, fds={9: plain})
    fail_at(monkeypatch, "readlink", "/700/fd/9", OSError(errno.ENAMETOOLONG, "File name too long"))
    assert stage.left() == ""
    stage.fake.add(700, fds={9: stage.node})
    assert "process 700 has" in stage.left()


def test_after_a_process_that_ended_in_a_look_at_its_files_all_are_listed_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have forked before, behind the place that the listing had reached."""
    real = os.listdir
    stage.fake.add(700)

    def files(path: str) -> list[str]:
        if path.endswith("/700/fd"):
            stage.fake.add(701)
        elif path.endswith("/701/fd"):
            stage.fake.remove(701)
            stage.fake.add(702, fds={9: stage.node})
        return real(path)

    monkeypatch.setattr(os, "listdir", files)
    assert stage.who() == [702]


def test_a_fork_that_is_hidden_until_its_exec_is_asked_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fake.add(700, uids=(os.geteuid(),) * 4, fds={9: stage.node})
    real, asked = os.listdir, [0]

    def hide(path: str) -> list[str]:
        if path.endswith("/700/fd"):
            asked[0] += 1
            if asked[0] < 4:
                raise PermissionError(13, "denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", hide)
    assert stage.holders().users_by_device(None) == ({stage.device.id: [700]}, "")


@pytest.fixture
def closely(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the descriptors that are asked for their device, on a node with its own /dev."""
    asked: list[str] = []

    def key(_: Mounts, pid: int, folder: str, fd: str) -> None:
        del pid, folder
        asked.append(fd)

    monkeypatch.setattr(Mounts, "key", key)
    stage.settings = Settings({"DEV_ROOT": "/dev"})
    return asked


@pytest.mark.parametrize(
    ("path", "may_be"),
    [
        ("/nvidia0", True),  # in a container's own /dev, as it shows from outside
        ("/nvidia-caps/nvidia-cap1", True),
        ("/dev/nvidia0", True),
        ("/dev/elsewhere", True),
        ("/dev/null", False),
        ("/home/alice/nvidia0", False),
    ],
)
def test_a_look_at_everybody_asks_a_file_whose_path_may_be_a_devices(
    stage: Stage, closely: list[str], path: str, may_be: bool
) -> None:
    stage.fake.add(700, fds={9: Path(path)})
    assert (stage.who(), closely) == ([], ["9"] * may_be)


@pytest.mark.parametrize(
    ("link", "asked"),
    [
        ("/dev/null", True),
        ("/tmp/x", True),
        ("/memfd:x (deleted)", True),
        ("socket:[12]", False),
        ("pipe:[12]", False),
        ("anon_inode:[eventpoll]", False),
    ],
)
def test_each_open_file_of_an_owner_is_asked_for_its_device(
    stage: Stage, closely: list[str], link: str, asked: bool
) -> None:
    stage.fake.add(700, fds={9: Path(link)})
    assert (stage.left(), closely) == ("", ["9"] * asked)


def test_a_node_that_was_bound_to_another_path_is_still_the_device(
    numbered: Stage, tmp_path: Path
) -> None:
    """`unshare -Urm`, a bind on /tmp/x: the link reads /tmp/x, its stat tells the number."""
    elsewhere = tmp_path / "x"
    elsewhere.symlink_to("/dev/full")
    numbered.fake.add(700, fds={9: elsewhere})
    assert numbered.left() == f"process 700 has {numbered.device.id} open"


@pytest.mark.parametrize(
    ("isolation", "other", "kept"),
    [
        ("off", "0000:af:00.0", False),
        ("cgroup", "0000:af:00.0", True),
        ("cgroup", "0000:3b:00.0.share1", False),
        ("cgroup", "0000:3b:00.0.gi2.ci0", False),
    ],
)
def test_with_a_device_cgroup_another_claim_of_the_user_excuses_its_own_card_alone(
    stage: Stage, isolation: str, other: str, kept: bool
) -> None:
    """A job passes its open GPU by a socket to another job of its user, and ends."""
    stage.settings = Settings(
        {"DEV_ROOT": str(stage.dev), "ISOLATION": isolation, "ALLOWED_PROCESSES": ""}
    )
    stage.fake.add(700, groups=[65401], fds={9: stage.node})
    held = {other: Lock(other, record(token="other", add_grp_id=65401), "")}
    holders = stage.holders()
    reason, unseen = device_users.remaining_device_user(stage.device.id, record(), holders, held)
    assert (bool(reason), unseen) == (kept, "")


def test_a_thread_that_ends_before_it_is_read_may_have_given_its_files_to_another(
    stage: Stage,
) -> None:
    """Each thread starts the next one and ends: none of a listing is there when it is read."""
    stage.fake.add(700, threads={700: "S", 701: "S"})
    (stage.fake.root / "700/task/701/fd").rmdir()
    assert stage.left() == "the files of process 700 cannot be seen"


def test_a_thread_that_began_after_the_listing_is_read_as_well(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fake.add(700, threads={700: "S", 701: "S"})
    tasks, listdir = stage.fake.root / "700/task", os.listdir

    def begin_a_thread(path: str) -> list[str]:
        if path.endswith("/task/701/fd") and not (tasks / "702").exists():
            (tasks / "702/fd").mkdir(parents=True)
            (tasks / "702/fd/9").symlink_to(stage.node)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", begin_a_thread)
    assert stage.who() == [700]


def test_threads_that_begin_without_end_cost_a_look_its_time_and_leave_a_doubt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    stage.fake.add(700, threads={700: "S", 701: "S"})
    listdir = os.listdir

    def begin_the_next(path: str) -> list[str]:
        folder, _, thread = path.removesuffix("/fd").rpartition("/")
        if folder.endswith("/task"):
            clock.now += 1.0
            Path(f"{folder}/{int(thread) + 1}/fd").mkdir(parents=True)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", begin_the_next)
    assert stage.left() == too_much_of(record().uid)


@pytest.mark.parametrize("compared", [True, False], ids=["by kcmp", "where kcmp is not known"])
def test_a_file_that_a_thread_has_for_itself_alone_is_seen(
    numbered: Stage, monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    """unshare(2) with CLONE_FILES: the process itself shows nothing then."""
    if not compared:
        monkeypatch.setattr(file_tables, "KCMP", {})
    program = (
        "import ctypes, os, sys, threading\n"
        "def hide():\n"
        "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"
        "    os.open('/dev/full', os.O_RDONLY)\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
        "threading.Thread(target=hide).start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as thief:
        assert thief.stdin is not None and thief.stdout is not None
        thief.stdout.readline()
        holders = numbered.holders(Proc())
        assert thief.pid in holders.pids_with_open(numbered.device.id, os.getuid())
        thief.stdin.close()
