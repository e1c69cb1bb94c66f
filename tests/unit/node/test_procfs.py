# SPDX-License-Identifier: Apache-2.0
"""What /proc says, in its own odd spelling."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from gpulock.alloc.environs import StartingProgramError, read_environ
from gpulock.node.procfs import CHUNK, UNREAD, Proc, parse_stat, parse_status
from tests.support.faults import fail_at, raising
from tests.support.trees import HOST_NS, FakeProc, stat_line, status_text

NASTY = ["a b", ") R 1 2 3 (", "((", "))", "sh) S 1 (x", "a\nb", "\xff"]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_cannot_be_taken_for_fields(name: str) -> None:
    found = parse_stat(stat_line(7, name, "S", 42, 43, 44))
    assert (found.ppid, found.state, found.session, found.start) == (42, "S", 43, 44)


@pytest.mark.parametrize("name", ["Groups:\t0", "x\nGroups:\t65400", "Uid:\t0\t0", "a b"])
def test_a_name_cannot_be_taken_for_a_line_of_status(name: str) -> None:
    found = parse_status(status_text(name, "S", 42, (1, 2, 3, 4), (65401,)))
    assert (found.ppid, found.uids) == (42, (1, 2, 3, 4))
    assert found.groups == {65401}


@pytest.mark.parametrize(("uids", "more"), [((0, 0, 0), b""), ((0,) * 4, b"NSsid:\t\n")])
def test_a_status_line_cut_short_is_an_error(uids: tuple[int, ...], more: bytes) -> None:
    with pytest.raises(ValueError):
        parse_status(status_text("sh", "S", 1, uids, ()) + more)


def test_our_own_process_reads_as_the_kernel_knows_it() -> None:
    proc, pid = Proc(), os.getpid()
    status = proc.status(pid)
    assert proc.stat(pid).ppid == status.ppid == os.getppid()
    assert proc.stat(pid).session == status.session == os.getsid(0)
    assert status.uids[:3] == os.getresuid()
    assert status.groups == set(os.getgroups())
    assert not status.kernel
    assert proc.running(pid, proc.start(pid))


@pytest.mark.parametrize("count", [4_000, 65_536])
def test_a_process_with_many_groups_shows_all_and_one_with_very_many_that_they_are_not_read(
    tmp_path: Path, count: int
) -> None:
    """A frozenset of all that there may be is 6 MiB, and a process may have each its own."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(7, groups=range(100_000, 100_000 + count))
    found = Proc(str(proc.root)).status(7)
    assert found.groups == (UNREAD if count > 4_000 else {*range(100_000, 104_000)})
    assert found.session == 7
    assert (proc.root / "7/status").stat().st_size > 3 * CHUNK


def test_a_process_that_is_gone_is_not_one_that_may_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeProc(tmp_path / "proc")
    proc = Proc(str(fake.root))
    with pytest.raises(ProcessLookupError):
        proc.stat(7)
    with pytest.raises(ProcessLookupError):
        proc.link(7, "cwd")
    assert not proc.running(7, 1000)
    fake.add(7)
    monkeypatch.setattr(os, "open", raising(PermissionError(1, "not permitted")))
    with pytest.raises(PermissionError):
        proc.running(7, 1000)


def test_the_namespace_is_empty_in_a_record_where_it_cannot_be_seen(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path / "proc")
    proc = Proc(str(fake.root))
    assert proc.namespaces("") == HOST_NS
    (fake.root / "self/ns/pid").unlink()
    assert proc.namespaces("") == ""
    with pytest.raises(OSError):
        proc.namespaces()


def test_a_thread_of_the_kernel_is_told_from_a_helper_it_started() -> None:
    helper = status_text("modprobe", "S", 2, (0,) * 4, ())
    thread = helper.replace(b"VmSize:\t    1000 kB\n", b"")
    assert (parse_status(thread).kernel, parse_status(helper).kernel) == (True, False)


@pytest.mark.parametrize(
    ("state", "threads", "running"),
    [("Z", {7: "Z"}, False), ("Z", {7: "Z", 8: "S"}, True), ("T", {7: "T"}, True)],
)
def test_a_zombie_is_over_only_when_all_its_threads_are(
    tmp_path: Path, state: str, threads: dict[int, str], running: bool
) -> None:
    fake = FakeProc(tmp_path / "proc")
    fake.add(7, state=state, threads=threads)
    assert Proc(str(fake.root)).running(7, 1000) is running


def test_of_a_file_that_is_larger_than_any_should_be_the_beginning_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"x" * (3 << 20))
    assert len(Proc(str(tmp_path)).read(7, "environ")) == 1 << 20


@pytest.mark.parametrize(("uids", "real"), [((0,) * 4, True), ((0, 1000, 0, 0), False)])
def test_pid_2_is_the_kernels_only_where_it_is_roots(
    tmp_path: Path, uids: tuple[int, ...], real: bool
) -> None:
    """In a container it is anybody's process, whatever it calls itself."""
    fake = FakeProc(tmp_path / "proc")
    fake.add(2, "kthreadd", ppid=0, uids=uids)
    status = fake.root / "2/status"
    status.write_text(status.read_text().replace("VmSize:\t    1000 kB\n", ""))
    proc = Proc(str(fake.root))
    proc.kernel_threads()
    assert proc.kthreadd == real


@pytest.mark.parametrize("variables", [0, 20_000])
def test_a_process_that_starts_programs_never_seems_to_have_been_started_without_its_mark(
    variables: int,
) -> None:
    """In the midst of execve(2) the file is empty, or cut, once in some dozens of reads."""
    again = 'exec sh -c "$0" "$0"'
    proc, refused = Proc(), 0
    env = {**{f"A{number}": "1" for number in range(variables)}, "MARK": "7"}
    with subprocess.Popen(["sh", "-c", again, again], env=env) as process:
        try:
            for _ in range(3000):
                try:
                    assert b"MARK=7" in read_environ(proc, process.pid)
                except StartingProgramError:
                    refused += 1
        finally:
            process.kill()
    assert refused < 3000


@pytest.mark.parametrize(("end_of_code", "starts"), [(0, True), (0x400000, False)])
def test_an_environment_that_is_still_counted_is_not_taken_for_none(
    tmp_path: Path, end_of_code: int, starts: bool
) -> None:
    fake = FakeProc(tmp_path / "proc")
    fake.add(7)
    stat = fake.root / "7/task/7/stat"
    line = stat.read_bytes().split()
    stat.write_bytes(b" ".join([*line[:26], b"%d" % end_of_code, *line[27:]]))
    with pytest.raises(StartingProgramError) if starts else contextlib.nullcontext():
        assert read_environ(Proc(str(fake.root)), 7) == b""


def test_a_process_that_was_started_without_a_variable_has_none() -> None:
    with subprocess.Popen(["cat"], env={}, stdin=-1, stdout=-1, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # it runs
        assert read_environ(Proc(), process.pid) == b""


def test_what_a_process_whose_leader_is_over_was_started_with_its_threads_tell(
    tmp_path: Path,
) -> None:
    fake = FakeProc(tmp_path / "proc")
    fake.add(7, state="Z", threads={7: "Z", 8: "S"})
    (fake.root / "7/task/8/environ").write_bytes(b"A=b\0")
    line = (fake.root / "7/task/8/stat").read_bytes().split()
    (fake.root / "7/task/8/stat").write_bytes(b" ".join([*line[:50], b"%d" % (int(line[50]) + 4)]))
    assert read_environ(Proc(str(fake.root)), 7) == b"A=b\0"


@pytest.mark.parametrize(("state", "fault"), [("Z", ProcessLookupError), ("S", PermissionError)])
def test_one_that_has_ended_is_gone_also_where_the_kernel_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, fault: type[OSError]
) -> None:
    """A new kernel does so, unless root asks: it has no memory whose owner could be told."""
    fake = FakeProc(tmp_path / "proc")
    fake.add(7, state=state)
    fail_at(monkeypatch, "open", "/7/environ", PermissionError(13, "denied"))
    with pytest.raises(fault):
        read_environ(Proc(str(fake.root)), 7)
