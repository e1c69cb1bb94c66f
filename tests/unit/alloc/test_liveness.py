# SPDX-License-Identifier: Apache-2.0
"""Alive, dead, unknown: dead only with proof, and the judge proves its own sight first."""

from __future__ import annotations

import pytest

from gpulock.alloc import liveness
from gpulock.alloc.job_processes import find_job_processes
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, DEAD, NOT_JUDGED, UNKNOWN, Verdict
from tests.support.faults import fail_at, raising
from tests.support.trees import BOOT, OTHER_BOOT, FakeProc, record


def process(**changes: object) -> Lock:
    fields: dict[str, object] = {"scheduler": "process", "add_grp_id": 0, "sid": 500, **changes}
    return Lock("x", record(**fields), "")


def verdict(fake: FakeProc, lock: Lock) -> str:
    rules: dict[str, liveness.LivenessRule] = {"process": liveness.process_verdict}
    return Judge(BOOT, ProcessScan(Proc(str(fake.root))), rules).verdict(lock).state


def common(fake: FakeProc, one: Owner) -> str:
    def ask(*_: object) -> Verdict:
        return Verdict(NOT_JUDGED, "")

    judge = Judge(BOOT, ProcessScan(Proc(str(fake.root))), {one.scheduler: ask})
    return judge.verdict(Lock("x", one, "")).state


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"node": "gpu01"}, NOT_JUDGED),  # from before the host's name changed
        ({"boot_id": OTHER_BOOT}, DEAD),
        ({"scheduler": "admin", "boot_id": OTHER_BOOT}, ALIVE),
    ],
)
def test_a_record_of_another_boot_is_dead_but_for_an_administrators(
    fake: FakeProc, changes: dict[str, object], state: str
) -> None:
    assert common(fake, record(**changes)) == state


def test_a_record_of_another_time_namespace_is_not_judged(fake: FakeProc) -> None:
    """Start times shift in a time namespace: the same process looks like another one."""
    (fake.root / "self/ns/time").symlink_to("time:[4026531834]")
    claimed = Proc(str(fake.root)).namespaces()
    assert common(fake, record(namespaces=claimed)) == NOT_JUDGED
    (fake.root / "self/ns/time").unlink()
    assert common(fake, record(namespaces=claimed)) == UNKNOWN


def test_a_process_lives_by_its_pid_and_start_time_and_by_its_session(fake: FakeProc) -> None:
    fake.add(500, start=1001, session=1)
    assert verdict(fake, process()) == DEAD
    fake.add(700, session=500)
    assert verdict(fake, process()) == ALIVE
    assert verdict(fake, process(sid=0)) == DEAD


@pytest.mark.parametrize("name", ["stat", "status"])
def test_a_process_that_may_not_be_looked_at_is_unknown(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake.add(500 if name == "stat" else 700)
    # as the kernel does without CAP_SYS_PTRACE
    fail_at(monkeypatch, "open", f"/{name}", PermissionError(1, "not permitted"))
    assert verdict(fake, process()) == UNKNOWN


def test_a_namespace_that_is_another_or_cannot_be_seen_is_unknown(fake: FakeProc) -> None:
    assert common(fake, record(namespaces="pid:[99]")) == UNKNOWN
    (fake.root / "self/ns/pid").unlink()
    assert common(fake, record()) == UNKNOWN
    assert common(fake, record(namespaces="")) == UNKNOWN


def test_a_record_that_cannot_be_read_or_is_being_made_is_unknown(fake: FakeProc) -> None:
    assert verdict(fake, Lock("x", None, "")) == UNKNOWN
    assert verdict(fake, Lock("x", None, "its owner record: begins with 'v2'")) == UNKNOWN
    assert verdict(fake, Lock("x", record(boot_id=OTHER_BOOT), "its anchors: garbage")) == UNKNOWN


@pytest.mark.parametrize("name", ["podman pause", "catatonit"])
def test_what_podman_leaves_for_its_user_until_a_reboot_keeps_no_claim(
    fake: FakeProc, name: str
) -> None:
    """The first podman of a user starts it: of `gpulock run -- podman run` it kept the GPUs."""
    (fake.root / str(fake.add(700, name)) / "environ").write_bytes(b"GPULOCK_CLAIM=token-500\0")
    assert verdict(fake, process(token="token-500")) == DEAD


@pytest.mark.parametrize("place_in_memory", [b"0 0 0", b"1 2 0"], ids=["none yet", "each time"])
def test_a_process_that_is_starting_a_program_keeps_its_users_claim_for_the_moment(
    fake: FakeProc, place_in_memory: bytes
) -> None:
    """Its environment is not there yet, or again: nobody knows what it was started as."""
    place = fake.root / str(fake.add(700)) / "task/700/stat"
    place.write_bytes(b" ".join([*place.read_bytes().split()[:49], place_in_memory]))
    assert verdict(fake, process(token="token-500")) == UNKNOWN
    assert verdict(fake, process(token="token-500", uid=1001)) == DEAD


def test_a_zombie_of_the_session_is_over(fake: FakeProc) -> None:
    fake.add(700, session=500, state="Z")
    assert verdict(fake, process()) == DEAD
    fake.add(700, session=500, state="Z", threads={700: "Z", 701: "S"})
    assert verdict(fake, process()) == ALIVE


def test_an_anchor_keeps_the_claim_of_a_process(fake: FakeProc) -> None:
    fake.add(600, start=2000)
    lock = process()
    lock.anchors = [(600, 2000, 0)]
    assert verdict(fake, lock) == ALIVE
    lock.anchors = [(600, 2001, 0)]
    assert verdict(fake, lock) == DEAD


def test_of_lists_of_thousands_of_groups_one_is_kept(fake: FakeProc) -> None:
    """gpulockd's Proc lives long, and a user with subordinate ids may have many such lists."""
    for pid in (700, 701, 702):
        fake.add(pid, groups=[pid, *range(10_000, 10_400)])
    proc = Proc(str(fake.root))
    found = [proc.status(pid).groups for pid in (700, 701, 702, 702, 700)]
    assert all(pid in groups for pid, groups in zip((700, 701, 702), found))
    assert found[3] is found[2]
    assert found[4] is not found[0]  # it was read again


@pytest.mark.parametrize("state", ["gone", "over"])
def test_an_owner_that_ends_after_the_processes_were_listed_is_unknown(
    fake: FakeProc, state: str
) -> None:
    """What it has started since is in no list."""
    fake.add(500, session=1)

    def make_judge() -> Judge:
        scan = ProcessScan(Proc(str(fake.root)))
        return Judge(BOOT, scan, {"process": liveness.process_verdict})

    judge = make_judge()
    assert judge.verdict(process(pid=499, sid=499)).state == DEAD
    if state == "over":
        fake.add(500, state="Z", session=1)
    else:
        fake.remove(500)
    found = judge.verdict(process())
    assert found.state == UNKNOWN
    assert "process 500 ended while the processes were looked at" in found.proof
    assert make_judge().verdict(process()).state == DEAD


@pytest.mark.parametrize(
    ("fault", "doubt"),
    [(ProcessLookupError(), ""), (PermissionError(13, "denied"), "process 700 cannot be seen")],
)
def test_a_process_of_its_session_that_cannot_be_seen_is_a_doubt(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch, fault: OSError, doubt: str
) -> None:
    fake.add(700, session=499)
    monkeypatch.setattr(ProcessScan, "is_process_of", raising(fault))
    scan = ProcessScan(Proc(str(fake.root)))
    found = find_job_processes(process(pid=499, sid=499), scan)
    assert (found.pids, found.doubt.partition(":")[0]) == ({}, doubt)


def test_what_was_not_looked_at_before_the_gate_is_unknown(fake: FakeProc) -> None:
    """Under the gate no environment is read: it may take long."""
    fake.add(700)
    scan = ProcessScan(Proc(str(fake.root)))
    scan.statuses()
    scan.scan_closed = True
    found = Judge(BOOT, scan, {"process": liveness.process_verdict}).verdict(process())
    assert (found.state, "was not looked at before the gate" in found.proof) == (UNKNOWN, True)
