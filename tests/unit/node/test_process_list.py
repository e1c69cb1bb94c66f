# SPDX-License-Identifier: Apache-2.0
"""The kernel's list of processes is believed whole, and of this user's own file, or not at all."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc import pid_numbers, process_scan
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.process_list import INIT, read_process_list
from gpulock.node.procfs import Proc
from tests.support.faults import raising
from tests.support.process_list import write_process_list

ME = os.getpid()
OTHER = 64_001


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    folder = tmp_path / "pins"
    folder.mkdir(0o700)
    return folder


def test_a_whole_list_is_read(pins: Path) -> None:
    write_process_list(pins, {INIT: 0, 7: 1000, 4_000_000: 3_000_000_000})
    assert read_process_list(str(pins)) == ([INIT, 7, 4_000_000], [0, 1000, 3_000_000_000])


def test_init_stands_there_in_any_case(pins: Path) -> None:
    write_process_list(pins, {7: 1000})
    assert read_process_list(str(pins)) == ([7, INIT], [1000, 0])


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 16])
def test_a_list_that_is_cut_short_is_none(pins: Path, cut: int) -> None:
    file = write_process_list(pins, {INIT: 0, 7: 1000})
    file.write_bytes(file.read_bytes()[:-cut])
    assert read_process_list(str(pins)) is None


def test_a_list_of_another_version_is_none(pins: Path) -> None:
    write_process_list(pins, {INIT: 0}, form=0x67706C00)
    assert read_process_list(str(pins)) is None


def test_a_list_that_ends_amid_others_words_is_none(pins: Path) -> None:
    file = write_process_list(pins, {INIT: 0})
    file.write_bytes(file.read_bytes() * 2 + bytes(8))
    assert read_process_list(str(pins)) is None


def test_a_list_whose_reading_fails_is_none(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process_list(pins, {INIT: 0})
    monkeypatch.setattr(os, "read", raising(BlockingIOError(11, "too many threads for one read")))
    assert read_process_list(str(pins)) is None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_list_that_others_may_write_is_none(pins: Path, mode: int) -> None:
    write_process_list(pins, {INIT: 0}).chmod(mode)
    assert read_process_list(str(pins)) is None


def test_a_folder_that_others_may_write_has_no_list(pins: Path) -> None:
    write_process_list(pins, {INIT: 0})
    pins.chmod(0o720)
    assert read_process_list(str(pins)) is None


@pytest.mark.root
@pytest.mark.parametrize("whose", ["folder", "list"])
def test_another_users_list_is_none(pins: Path, whose: str) -> None:
    file = write_process_list(pins, {INIT: 0})
    os.chown(pins if whose == "folder" else file, OTHER, -1)
    assert read_process_list(str(pins)) is None


@pytest.mark.parametrize("whose", ["folder", "list"])
def test_no_link_leads_to_a_list(pins: Path, tmp_path: Path, whose: str) -> None:
    file = write_process_list(pins, {INIT: 0})
    if whose == "folder":
        pins = tmp_path / "link"
        pins.symlink_to(file.parent)
    else:
        (pins / "real").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to("real")
    assert read_process_list(str(pins)) is None


def always(answer: bool) -> Callable[[ProcessScan], bool]:
    """Return a method that answers always the same."""
    return lambda _: answer


def sight(pins: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessScan:
    """Return a look for this user's processes and root's, on a node of many processes."""
    monkeypatch.setattr(process_scan, "CROWD", 1)
    monkeypatch.setattr(pid_numbers, "RATE", 1.0)  # no look takes long
    monkeypatch.setattr(ProcessScan, "sees_all", always(True))
    scan = ProcessScan(Proc(pins=str(pins)))
    scan.restrict({os.geteuid(): ""})
    return scan


def test_a_look_takes_the_users_from_the_list(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process_list(pins, {INIT: 0, ME: os.geteuid(), os.getppid(): OTHER})
    scan = sight(pins, monkeypatch)
    assert ME in scan.statuses()
    assert os.getppid() in scan.others


def test_a_process_that_vanished_says_nothing_of_its_users_others(
    pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = int(Path("/proc/sys/kernel/pid_max").read_text()) - 1

    def account(_: ProcessScan, pid: int, uid: int) -> int:
        if pid == gone:
            raise ProcessLookupError
        return uid

    monkeypatch.setattr(ProcessScan, "account", account)
    write_process_list(pins, {INIT: 0, os.getppid(): OTHER, gone: OTHER})
    scan = sight(pins, monkeypatch)
    assert os.getppid() not in scan.statuses()
    assert os.getppid() in scan.others
    assert scan.blind == ""


@pytest.mark.parametrize("first", [os.geteuid(), OTHER])
def test_a_process_that_stands_twice_is_looked_at_if_either_is_the_users(
    pins: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    second = OTHER if first != OTHER else os.geteuid()
    file = write_process_list(pins, {INIT: 0, ME: first})
    *head, end = struct.iter_unpack("<II", file.read_bytes())
    file.write_bytes(b"".join(struct.pack("<II", *words) for words in (*head, (ME, second), end)))
    scan = sight(pins, monkeypatch)
    assert ME in scan.statuses()
    assert ME not in scan.others


def test_a_look_sees_who_began_after_the_list(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process_list(pins, {INIT: 0})
    scan = sight(pins, monkeypatch)
    scan.list_new()
    child = os.fork()
    if not child:
        os.read(os.pipe()[0], 1)
        os._exit(0)
    try:
        assert child in scan.statuses()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_where_numbers_may_have_come_round_the_list_is_read_again(
    pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was another user's may be the user's by then."""
    write_process_list(pins, {INIT: 0, ME: OTHER})
    scan = sight(pins, monkeypatch)
    monkeypatch.setattr(pid_numbers, "RATE", -1.0)  # numbers a second
    scan.list_new()
    assert ME in scan.others
    write_process_list(pins, {INIT: 0, ME: os.geteuid()})
    monkeypatch.delattr(Proc, "pids")
    assert ME in scan.statuses()
    assert ME not in scan.others


@pytest.mark.parametrize("there", [True, False])
def test_without_a_whole_list_a_look_reads_proc(
    pins: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        file = write_process_list(pins, {INIT: 0})
        file.write_bytes(file.read_bytes()[:-8])
    assert {ME, os.getppid()} <= {*sight(pins, monkeypatch).statuses()}


def test_a_look_at_another_pid_namespace_reads_proc(
    pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_process_list(pins, {INIT: 0, ME: OTHER})
    scan = sight(pins, monkeypatch)
    monkeypatch.setattr(ProcessScan, "sees_all", always(False))
    assert ME in scan.statuses()


def test_a_small_node_is_listed_by_proc(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process_list(pins, {INIT: 0, ME: OTHER})
    scan = sight(pins, monkeypatch)
    monkeypatch.setattr(process_scan, "CROWD", 1 << 30)
    assert ME in scan.statuses()
