# SPDX-License-Identifier: Apache-2.0
"""A device goes to the next job when its memory is given back, as the exporter tells it."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from gpulock.alloc import memory_check
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.memory_check import CLEAN, DIRTY, MIB, NO_SAMPLE, OTHER_PROCESSES, WAIT
from gpulock.alloc.release import ReleaseResult, release_locks
from gpulock.cli.admin import reap
from gpulock.cli.claims import release as cli_release
from gpulock.cli.session import CommandRefusedError
from gpulock.daemon.reconcile import report_messages
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node import sample
from gpulock.sge import epilog as sge_epilog
from gpulock.sge.hook import SgeHookCall as SgeCall
from gpulock.slurm import epilog as slurm_epilog
from gpulock.slurm.call import SlurmHookCall as SlurmCall
from gpulock.store import boot, quarantine
from gpulock.store.owner import Owner
from gpulock.workstation.peer import Peer
from gpulock.workstation.user_release import release_for_user
from gpulock.workstation.wire import RELEASE, SocketRequest
from tests.support.clock import VirtualClock
from tests.support.driver_reads import observe_driver_reads
from tests.support.faults import disk_full
from tests.support.trees import BOOT, OTHER_BOOT, Box, bus, judge_of, judging, record, soon

KEYS = {"LEFTOVER_PROCESSES": "report", "SAMPLE_PERIOD": "0.05", "LEFTOVER_MEMORY": "256"}
LATER = 3600.0  # seconds: a look in times to come, newer than all that happens in a test


def seen(**values: object) -> sample.DeviceSample:
    return sample.DeviceSample({"looked": 100.0, "memory_used": 0, "processes": 0, **values}, {})


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({}, CLEAN),
        ({"memory_used": 256 * MIB}, CLEAN),
        ({"memory_used": 256 * MIB + 1}, DIRTY),
        ({"memory_used": 80 << 30, "processes": None}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 1}, OTHER_PROCESSES),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 91.0}, OTHER_PROCESSES),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 90.0}, WAIT),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 60.0}, WAIT),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 59.0}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 0, "listed": 91.0}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 0, "listed": 90.0}, WAIT),
        ({"memory_used": 0, "processes": 1, "listed": 60.0}, CLEAN),
        ({"memory_used": 80 << 30, "coherent": 0}, DIRTY),
        ({"memory_used": 80 << 30, "coherent": 1}, CLEAN),
        ({"memory_used": 80 << 30, "coherent": 1, "looked": 90.0}, WAIT),
        ({"memory_used": None}, NO_SAMPLE),
        ({"looked": None}, NO_SAMPLE),
        ({"looked": 90.0}, WAIT),
        ({"looked": 90.0, "memory_used": 80 << 30}, WAIT),
        ({"looked": 89.0}, NO_SAMPLE),
    ],
)
def test_only_a_fresh_look_after_the_device_was_quiet_counts(
    values: dict[str, object], state: str
) -> None:
    assert (
        memory_check.judge_memory_sample(seen(**values), 90.0, 100.0, 10.0, 256 * MIB, 30.0)
        == state
    )


def test_of_a_device_that_no_sample_names_nobody_tells() -> None:
    assert memory_check.judge_memory_sample(None, 90.0, 100.0, 10.0, 256 * MIB, 30.0) == NO_SAMPLE


# --- on a node ------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path, 2, **KEYS, EXPORTER_DIR=str(tmp_path / "exporter"))
    made.proc.execd(tmp_path)
    made.proc.shepherd(500, tmp_path)
    (tmp_path / "exporter").mkdir()
    return made


def tell(box: Box, used: int, looked: float, others: str = "processes=0", cards: int = 1) -> None:
    """Let the exporter have looked at the first GPUs, and at who is there."""
    now = clock_boottime()
    lines = [
        sample.SAMPLE_LINE,
        f"boot_id={BOOT}",
        f"boottime={now}",
        *[f"device {bus(n)} looked={looked} memory_used={used} {others}" for n in range(cards)],
    ]
    (box.root / "exporter" / "sample").write_text("\n".join(lines) + "\n")


def hold(box: Box) -> Owner:
    node = box.node()
    return claim_devices(
        node, record(token="", devices=()), ClaimRequest(1), judging(node), soon()
    ).owner


def let_go(box: Box, one: Owner) -> ReleaseResult:
    node = box.node()
    return release_locks(
        node, lambda o: o.token == one.token, judge_of(node), Deadline(5), "epilog"
    )


def freed_as(box: Box) -> str:
    """Return how the one released lock was freed."""
    (place,) = (box.lock / "released").iterdir()
    return dict(line.split("=", 1) for line in (place / "released").read_text().splitlines())["how"]


def test_a_device_that_is_clean_is_freed_at_once(box: Box) -> None:
    one = hold(box)
    tell(box, 0, clock_boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog"


def test_memory_that_is_not_given_back_puts_the_device_out_of_service(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    note = quarantine.read_device_note(str(box.state), quarantine.QUARANTINE, bus(0))
    assert (note["by"], note["reason"]) == (
        "gpulock",
        "memory: 300 MiB stay in use after job 12",
    )
    node = box.node()
    found = claim_devices(
        node, record(token="", devices=(), job_id="13"), ClaimRequest(1), judging(node), soon()
    )
    assert [device.id for device in found.devices] == [bus(1)]


def test_a_note_that_an_administrator_made_meanwhile_stands(box: Box) -> None:
    one = hold(box)
    quarantine.write_device_note(
        str(box.state), quarantine.QUARANTINE, bus(0), "root", "its fan died"
    )
    tell(box, 300 * MIB, clock_boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    note = quarantine.read_device_note(str(box.state), quarantine.QUARANTINE, bus(0))
    assert (note["by"], note["reason"]) == ("root", "its fan died")


# --- an exporter gone mad ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "cards", "may"),
    [
        ((), 1, True),
        ((), 0, True),
        ((1,), 1, False),
        ((1,), 3, False),
        ((1,), 4, True),
        ((1, 2), 4, False),
        ((0, 1, 2), 4, True),
    ],
)
def test_half_of_a_node_goes_out_on_an_exporters_word(
    out: tuple[int, ...], cards: int, may: bool
) -> None:
    assert memory_check.may_quarantine_card(bus(0), {bus(number) for number in out}, cards) is may


@pytest.fixture
def four(tmp_path: Path) -> Box:
    """A node of four cards, of which one job holds all."""
    made = Box(tmp_path, 4, **KEYS, EXPORTER_DIR=str(tmp_path / "exporter"))
    made.proc.execd(tmp_path)
    made.proc.shepherd(500, tmp_path)
    (tmp_path / "exporter").mkdir()
    node = made.node()
    claim_devices(node, record(token="", devices=()), ClaimRequest(4), judging(node), soon())
    return made


def end(box: Box) -> ReleaseResult:
    node = box.node()
    return release_locks(node, lambda _: True, judge_of(node), Deadline(5), "epilog")


def out(box: Box) -> list[str]:
    return quarantine.list_noted_devices(str(box.state), quarantine.QUARANTINE)


def test_of_an_exporter_that_says_all_are_dirty_half_of_the_node_is_left(four: Box) -> None:
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=4)

    released = end(four)

    reason = "memory: 300 MiB stay in use after job 12"
    assert out(four) == [bus(0), bus(1)]
    assert released.away == [(bus(0), reason), (bus(1), reason)]
    told = f"{reason}; {memory_check.QUARANTINE_LIMIT_REACHED}"
    assert released.spared == [(bus(2), told), (bus(3), told)]
    assert (four.locks(), released.kept) == ([], []), "a lock that stays is out of service as well"
    said = (four.lock / "released").glob(f"*.{bus(2)}/*")
    assert any(told in path.read_text() for path in said), "the history tells it"


def test_the_other_half_stays_in_service_however_long_the_exporter_says_so(four: Box) -> None:
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=4)
    end(four)

    for _ in range(3):
        node = four.node()
        claim_devices(node, record(token="", devices=()), ClaimRequest(2), judging(node), soon())
        assert four.locks() == [bus(2), bus(3)]
        end(four)
        assert four.locks() == []

    assert out(four) == [bus(0), bus(1)]


def test_what_is_out_for_another_reason_does_not_count(four: Box) -> None:
    for number, by, reason in ((2, "root", "its fan died"), (3, "gpulock", "missing: not there")):
        quarantine.write_device_note(
            str(four.state), quarantine.QUARANTINE, bus(number), by, reason
        )
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=2)

    assert len(end(four).freed) == 4
    assert out(four) == [bus(0), bus(1), bus(2), bus(3)]


def test_what_the_policy_put_out_for_what_an_exporter_said_does(four: Box) -> None:
    quarantine.write_device_note(
        str(four.state), quarantine.QUARANTINE, bus(3), "gpulock", "missing: not there; xid: XID 79"
    )
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=3)

    end(four)

    assert out(four) == [bus(0), bus(3)]


def test_no_driver_is_read_with_the_gate_held(four: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a read may never return, and nobody gets through the gate then."""
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=1)
    reads = observe_driver_reads(four.lock, monkeypatch)

    end(four)

    assert out(four) == [bus(0)]
    assert (reads != [], True in reads) == (True, False)


def test_each_decision_is_told(four: Box) -> None:
    tell(four, 300 * MIB, clock_boottime() + LATER, cards=4)
    four.proc.remove(500)
    for number in range(4):
        (four.lock / "locks" / bus(number) / "quiet").write_text("1.0\n")

    node = four.node()
    report = reconcile_locks(node, judge_of(node), soon())

    words = "memory: 300 MiB stay in use after job 12"
    reaped = [click.unstyle(line) for line in reap.format_reap_report(report, node.devices())]
    assert [line for line in reaped if line.startswith("quarantined")] == [
        f"quarantined GPU 0: {words}",
        f"quarantined GPU 1: {words}",
    ]
    spared = f"{words}; {memory_check.QUARANTINE_LIMIT_REACHED}"
    assert [line for line in reaped if line.startswith("spared")] == [
        f"spared      GPU {n}: {spared}" for n in (2, 3)
    ]
    said = report_messages.reconcile_event_messages(report)
    assert [line for line in said if "stays in service" in line] == [
        f"{bus(n)} stays in service, though: {spared}" for n in (2, 3)
    ]


def test_an_epilog_tells_what_went_out_of_service() -> None:
    released = ReleaseResult()
    released.freed, released.away = [bus(0)], [(bus(0), "memory: 300 MiB stay in use")]
    released.spared = [(bus(1), "memory: 300 MiB stay in use; too many are out")]

    told = f"{bus(0)} is out of service: memory: 300 MiB stay in use"
    spared = f"{bus(1)} stays in service, though: memory: 300 MiB stay in use; too many are out"

    call = SgeCall([], {"JOB_ID": "12", "SGE_TASK_ID": "1", "QUEUE": "gpu.q"})
    lines = sge_epilog.format_sge_release(call, released, 0.1)
    assert {(f"{call.who}: {told}", False), (f"{call.who}: {spared}", False)} <= {*lines}
    keys = {"JOB_ID": "12", "JOB_UID": "7", "CLUSTER_NAME": "lab"}
    environ = {f"SLURM_{key}": value for key, value in keys.items()}
    other = SlurmCall({**environ, "SLURMD_NODENAME": "n1"})
    found = slurm_epilog.format_slurm_release(other, released, 0.1)
    assert {f"{other.who}: {told}", f"{other.who}: {spared}"} <= {*found}


# --- when it is looked at ------------------------------------------------------------------------


def test_until_the_next_sample_the_lock_drains(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime())
    kept = let_go(box, one).kept
    assert kept == [(bus(0), "its memory is checked first")]
    owner = box.node().store.read(bus(0)).owner
    assert owner is not None and owner.draining == 1


def test_a_reconcile_frees_it_after_that_look(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime())
    let_go(box, one)
    node = box.node()
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    tell(box, 0, clock_boottime())
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == []
    assert out(box) == []


def test_a_device_that_was_noted_as_quiet_by_a_clock_ahead_is_not_kept_for_ever(
    box: Box, clock: VirtualClock
) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime())
    let_go(box, one)
    (box.lock / "locks" / bus(0) / "quiet").write_text(f"{clock_boottime() + LATER}\n")
    node = box.node()
    reconcile_locks(node, judge_of(node), soon())
    clock.now += 1
    tell(box, 0, clock_boottime())
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == []


@pytest.mark.parametrize(("by", "counts"), [("gpulock", True), ("root", False)])
def test_what_an_administrator_put_out_is_not_the_exporters_word(by: str, counts: bool) -> None:
    note = {"by": by, "reason": "memory: a module is to be replaced"}
    assert memory_check.note_set_by_exporter(note) == counts


def test_a_list_that_still_has_the_jobs_process_hands_nothing_on(box: Box) -> None:
    """Process lists are made seldom: one that is older than the job's end has what is gone."""
    one = hold(box)
    before = clock_boottime()
    tell(box, 300 * MIB, clock_boottime() + LATER, f"processes=1 listed={before}")
    assert let_go(box, one).kept == [(bus(0), "its memory is checked first")]
    node = box.node()
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    tell(box, 300 * MIB, clock_boottime() + LATER, f"processes=0 listed={clock_boottime()}")
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == []
    assert out(box) == [bus(0)]


def test_memory_of_a_process_that_is_listed_afterwards_is_a_services(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime() + LATER, f"processes=1 listed={clock_boottime() + LATER}")
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog"
    assert out(box) == []


def test_so_does_it_what_no_epilog_released(box: Box, clock: VirtualClock) -> None:
    """The first reconcile that finds the device quiet notes when: an older look proves nothing."""
    hold(box)
    tell(box, 300 * MIB, clock_boottime())
    box.proc.remove(500)
    node = box.node()
    clock.now += 1
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    clock.now += 1
    tell(box, 300 * MIB, clock_boottime())
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == []
    assert out(box) == [bus(0)]


def test_without_an_exporter_the_look_at_open_files_decides_and_the_record_says_so(
    box: Box,
) -> None:
    assert let_go(box, hold(box)).freed == [bus(0)]
    assert freed_as(box) == "epilog (no exporter reported its memory)"


def test_the_record_says_so_too_where_the_driver_told_the_exporter_nothing(box: Box) -> None:
    one = hold(box)
    tell(box, 0, clock_boottime() - box.node().settings.max_sample_age - 1)
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog (no exporter reported its memory)"


def test_a_device_that_cannot_be_put_out_of_service_stays_locked(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = hold(box)
    tell(box, 300 * MIB, clock_boottime() + LATER)
    monkeypatch.setattr(quarantine, "write_device_note", disk_full)
    kept = let_go(box, one).kept
    assert kept[0][1].startswith("memory: 300 MiB stay in use after job 12, and it cannot be")
    assert box.locks() == [bus(0)]


def test_a_reboot_has_emptied_every_memory(box: Box) -> None:
    hold(box)
    box.proc.boot("11111111-2222-3333-4444-555555555555")
    tell(box, 300 * MIB, clock_boottime())
    node = box.node()
    try:
        claim_devices(
            node,
            record(token="", devices=(), job_id="13", pid=501),
            ClaimRequest(2),
            judging(node),
            soon(),
        )
    except Refusal as refusal:
        pytest.fail(f"an old boot's lock is in the way: {refusal}")
    assert out(box) == []


def test_memory_in_use_now_is_nothing_of_a_claim_before_the_boot(box: Box) -> None:
    node = box.node()
    node.store.check(make=True)
    boot.begin_boot(node.store, str(box.state), BOOT, node.name)
    node.store.make(bus(0), record(boot_id=OTHER_BOOT, job_id="7"))
    tell(box, 300 * MIB, clock_boottime() + LATER)
    other = record(token="", devices=(), job_id="13", pid=501)
    found = claim_devices(box.node(), other, ClaimRequest(2), judging(box.node()), soon())
    assert ([device.id for device in found.devices], out(box)) == ([bus(0), bus(1)], [])


def test_what_a_claim_of_the_same_run_left_is_handed_over_as_from_any_other(box: Box) -> None:
    """It was cut short, but a process of the job may have used the device by then."""
    one = hold(box)
    box.node().store.rewrite(bus(0), one.copy(devices=(bus(0), bus(1))))
    tell(box, 300 * MIB, clock_boottime() + LATER)
    again = record(token="", devices=())
    found = claim_devices(box.node(), again, ClaimRequest(1), judging(box.node()), soon())
    assert ([device.id for device in found.devices], out(box)) == ([bus(1)], [bus(0)])


def test_a_claim_does_not_get_a_device_that_it_quarantined(box: Box) -> None:
    """Both devices are held by dead jobs; the first one's memory is not given back."""
    node = box.node()
    claim_devices(node, record(token="", devices=()), ClaimRequest(2), judging(node), soon())
    box.proc.remove(500)
    for name in (bus(0), bus(1)):
        (box.lock / "locks" / name / "quiet").write_text("1.0\n")
    tell(box, 300 * MIB, clock_boottime())
    other = record(token="", devices=(), job_id="13", pid=501)
    with pytest.raises(Refusal, match="1 of 2 free"):
        claim_devices(box.node(), other, ClaimRequest(2), judging(box.node()), soon())
    found = claim_devices(box.node(), other, ClaimRequest(1), judging(box.node()), soon())
    assert [device.id for device in found.devices] == [bus(1)]


# --- given back by who holds it -------------------------------------------------------------------

UID = os.geteuid()


def hold_as_process(box: Box, count: int = 1) -> SocketRequest:
    """Hold the first GPUs by a process of ours that is gone by now; return what gives it back."""
    fields = {"scheduler": "process", "pid": 600, "start": 7, "job_id": "600", "add_grp_id": 0}
    node = box.node()
    claim_devices(
        node,
        record(token="", devices=(), uid=UID, **fields),
        ClaimRequest(count),
        judging(node),
        soon(),
    )
    return SocketRequest(RELEASE, 600, 7)


def give(box: Box, request: SocketRequest) -> tuple[str, ...]:
    """Let gpulockd give it back for us."""
    return release_for_user(box.node(), Peer(os.getpid(), UID, -1, True), request, Deadline(5))


def take_back(box: Box, force: bool = False) -> list[str]:
    """Let `gpulock release` free GPU 0."""
    node = box.node()
    let = cli_release.release_selected_locks(
        node, node.devices(), lambda lock: lock.id == bus(0), force, "x"
    )
    return [one.lock.id for one in let]


def test_gpulockd_gives_nothing_back_before_the_exporter_has_looked_again(
    box: Box, clock: VirtualClock
) -> None:
    request = hold_as_process(box)
    tell(box, 300 * MIB, clock_boottime())
    clock.now += 1
    with pytest.raises(Refusal, match="its memory is checked first"):
        give(box, request)
    assert box.locks() == [bus(0)]
    clock.now += 1
    tell(box, 0, clock_boottime())
    assert give(box, request) == (bus(0),)
    assert out(box) == []


def test_gpulockd_gives_back_all_or_none(box: Box) -> None:
    request = hold_as_process(box, 2)
    tell(box, 0, clock_boottime() + LATER, cards=1)
    with (box.root / "exporter" / "sample").open("a") as file:
        file.write(
            f"device {bus(1)} looked={clock_boottime()} memory_used={300 * MIB} processes=0\n"
        )
    with pytest.raises(Refusal, match="its memory is checked first"):
        give(box, request)
    assert box.locks() == [bus(0), bus(1)]


def test_what_gpulockd_gives_back_with_memory_in_use_goes_to_quarantine(box: Box) -> None:
    request = hold_as_process(box)
    tell(box, 300 * MIB, clock_boottime() + LATER)
    assert give(box, request) == (bus(0),)
    assert out(box) == [bus(0)]


def test_a_release_waits_for_that_look_and_keeps_the_device_without_it(box: Box) -> None:
    hold_as_process(box)
    tell(box, 0, clock_boottime())
    with pytest.raises(CommandRefusedError, match="its memory is checked first"):
        take_back(box)
    assert box.locks() == [bus(0)]


def test_what_is_released_with_memory_in_use_goes_to_quarantine(box: Box) -> None:
    hold_as_process(box)
    tell(box, 300 * MIB, clock_boottime() + LATER)
    assert take_back(box) == [bus(0)]
    assert out(box) == [bus(0)]


def test_force_asks_nobody(box: Box) -> None:
    hold_as_process(box)
    tell(box, 300 * MIB, clock_boottime() + LATER)
    assert take_back(box, force=True) == [bus(0)]
    assert out(box) == []
