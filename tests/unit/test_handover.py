# SPDX-License-Identifier: Apache-2.0
"""A device goes to the next job when its memory is given back, as the exporter tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock import handover, quarantine, sample
from gpulock.claim import claim
from gpulock.cli import release as cli_release
from gpulock.cli.session import Refused
from gpulock.daemon.giving import give_back
from gpulock.daemon.peer import Peer
from gpulock.daemon.reconcile import reconcile
from gpulock.daemon.wire import RELEASE, Request
from gpulock.deadline import Deadline, boottime
from gpulock.handover import CLEAN, DIRTY, MIB, OTHERS, UNTOLD, WAIT
from gpulock.owner import Owner
from gpulock.refusal import Refusal
from gpulock.release import Released, release
from tests.unit.trees import BOOT, Box, bus, judge_of, judging, record, soon

KEYS = {"CLEAN": "report", "SAMPLE_PERIOD": "0.05", "CLEAN_MEMORY": "256"}
LATER = 3600.0  # seconds: a look in times to come, newer than all that happens in a test


def seen(**values: object) -> sample.Seen:
    return sample.Seen({"looked": 100.0, "memory_used": 0, "processes": 0, **values}, {})


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({}, CLEAN),
        ({"memory_used": 256 * MIB}, CLEAN),
        ({"memory_used": 256 * MIB + 1}, DIRTY),
        ({"memory_used": 80 << 30, "processes": None}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 1}, OTHERS),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 91.0}, OTHERS),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 90.0}, WAIT),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 60.0}, WAIT),
        ({"memory_used": 80 << 30, "processes": 1, "listed": 59.0}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 0, "listed": 91.0}, DIRTY),
        ({"memory_used": 80 << 30, "processes": 0, "listed": 90.0}, WAIT),
        ({"memory_used": 0, "processes": 1, "listed": 60.0}, CLEAN),
        ({"memory_used": None}, UNTOLD),
        ({"looked": None}, UNTOLD),
        ({"looked": 90.0}, WAIT),
        ({"looked": 90.0, "memory_used": 80 << 30}, WAIT),
        ({"looked": 89.0}, UNTOLD),
    ],
)
def test_only_a_fresh_look_after_the_device_was_quiet_counts(
    values: dict[str, object], state: str
) -> None:
    assert handover.judge(seen(**values), 90.0, 100.0, 10.0, 256 * MIB, 30.0) == state


def test_of_a_device_that_no_sample_names_nobody_tells() -> None:
    assert handover.judge(None, 90.0, 100.0, 10.0, 256 * MIB, 30.0) == UNTOLD


# --- on a node ------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path, 2, **KEYS, EXPORTER_DIR=str(tmp_path / "exporter"))
    made.proc.execd(tmp_path)
    made.proc.shepherd(500, tmp_path)
    (tmp_path / "exporter").mkdir()
    return made


def tell(box: Box, used: int, looked: float, others: str = "processes=0") -> None:
    """Let the exporter have looked at GPU 0, and at who is there."""
    now = boottime()
    lines = [
        sample.SAMPLE_LINE,
        f"boot_id={BOOT}",
        f"boottime={now}",
        f"device {bus(0)} looked={looked} memory_used={used} {others}",
    ]
    (box.root / "exporter" / "sample").write_text("\n".join(lines) + "\n")


def hold(box: Box) -> Owner:
    node = box.node()
    return claim(node, record(token="", devices=()), 1, judging(node), soon()).owner


def let_go(box: Box, one: Owner) -> Released:
    node = box.node()
    return release(node, lambda o: o.token == one.token, judge_of(node), Deadline(5), "epilog")


def freed_as(box: Box) -> str:
    """Return how the one released lock was freed."""
    (place,) = (box.lock / "released").iterdir()
    return dict(line.split("=", 1) for line in (place / "released").read_text().splitlines())["how"]


def test_a_device_that_is_clean_is_freed_at_once(box: Box) -> None:
    one = hold(box)
    tell(box, 0, boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog"


def test_memory_that_is_not_given_back_puts_the_device_out_of_service(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    note = quarantine.read(str(box.state), quarantine.QUARANTINE, bus(0))
    assert (note["by"], note["because"]) == (
        "gpulock",
        "memory: 300 MiB stay in use after job 12",
    )
    node = box.node()
    found = claim(node, record(token="", devices=(), job_id="13"), 1, judging(node), soon())
    assert [device.id for device in found.devices] == [bus(1)]


def test_a_note_that_an_administrator_made_meanwhile_stands(box: Box) -> None:
    one = hold(box)
    quarantine.put(str(box.state), quarantine.QUARANTINE, bus(0), "root", "its fan died")
    tell(box, 300 * MIB, boottime() + LATER)
    assert let_go(box, one).freed == [bus(0)]
    note = quarantine.read(str(box.state), quarantine.QUARANTINE, bus(0))
    assert (note["by"], note["because"]) == ("root", "its fan died")


def test_until_the_exporter_has_looked_again_the_lock_settles(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, boottime())
    kept = let_go(box, one).kept
    assert kept == [(bus(0), "its memory is looked at first")]
    owner = box.node().store.read(bus(0)).owner
    assert owner is not None and owner.settling == 1


def test_a_reconcile_frees_it_after_that_look(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, boottime())
    let_go(box, one)
    node = box.node()
    reconcile(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    tell(box, 0, boottime())
    reconcile(node, judge_of(node), soon())
    assert box.locks() == []
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == []


def test_a_list_that_still_has_the_jobs_process_hands_nothing_on(box: Box) -> None:
    """Process lists are made seldom: one that is older than the job's end has what is gone."""
    one = hold(box)
    before = boottime()
    tell(box, 300 * MIB, boottime() + LATER, f"processes=1 listed={before}")
    assert let_go(box, one).kept == [(bus(0), "its memory is looked at first")]
    node = box.node()
    reconcile(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    tell(box, 300 * MIB, boottime() + LATER, f"processes=0 listed={boottime()}")
    reconcile(node, judge_of(node), soon())
    assert box.locks() == []
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == [bus(0)]


def test_memory_of_a_process_that_is_listed_afterwards_is_a_services(box: Box) -> None:
    one = hold(box)
    tell(box, 300 * MIB, boottime() + LATER, f"processes=1 listed={boottime() + LATER}")
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog"
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == []


def test_so_does_it_what_no_epilog_released(box: Box) -> None:
    """The first reconcile that finds the device quiet notes when: an older look proves nothing."""
    hold(box)
    tell(box, 300 * MIB, boottime())
    box.proc.remove(500)
    node = box.node()
    reconcile(node, judge_of(node), soon())
    assert box.locks() == [bus(0)]
    tell(box, 300 * MIB, boottime())
    reconcile(node, judge_of(node), soon())
    assert box.locks() == []
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == [bus(0)]


def test_without_an_exporter_the_look_at_open_files_decides_and_the_record_says_so(
    box: Box,
) -> None:
    assert let_go(box, hold(box)).freed == [bus(0)]
    assert freed_as(box) == "epilog (no exporter told its memory)"


def test_the_record_says_so_too_where_the_driver_told_the_exporter_nothing(box: Box) -> None:
    one = hold(box)
    tell(box, 0, boottime() - box.node().settings.max_sample_age - 1)
    assert let_go(box, one).freed == [bus(0)]
    assert freed_as(box) == "epilog (no exporter told its memory)"


def test_a_device_that_cannot_be_put_out_of_service_stays_locked(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    one = hold(box)
    tell(box, 300 * MIB, boottime() + LATER)
    monkeypatch.setattr(quarantine, "put", full)
    kept = let_go(box, one).kept
    assert kept[0][1].startswith("memory: 300 MiB stay in use after job 12, and it cannot be")
    assert box.locks() == [bus(0)]


def test_a_reboot_has_emptied_every_memory(box: Box) -> None:
    hold(box)
    box.proc.boot("11111111-2222-3333-4444-555555555555")
    tell(box, 300 * MIB, boottime())
    node = box.node()
    try:
        claim(node, record(token="", devices=(), job_id="13", pid=501), 2, judging(node), soon())
    except Refusal as refusal:
        pytest.fail(f"an old boot's lock is in the way: {refusal}")
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == []


def test_a_claim_that_settles_does_not_get_what_it_has_put_out_of_service(box: Box) -> None:
    """Both devices are held by dead jobs; the first one's memory is not given back."""
    node = box.node()
    claim(node, record(token="", devices=()), 2, judging(node), soon())
    box.proc.remove(500)
    for name in (bus(0), bus(1)):
        (box.lock / "locks" / name / "quiet").write_text("1.0\n")
    tell(box, 300 * MIB, boottime())
    other = record(token="", devices=(), job_id="13", pid=501)
    with pytest.raises(Refusal, match="1 of 2 free"):
        claim(box.node(), other, 2, judging(box.node()), soon())
    found = claim(box.node(), other, 1, judging(box.node()), soon())
    assert [device.id for device in found.devices] == [bus(1)]


# --- given back by who holds it -------------------------------------------------------------------

UID = os.geteuid()


def hold_as_process(box: Box) -> Request:
    """Hold GPU 0 by a process of ours that is gone by now; return what gives it back."""
    fields = {"scheduler": "process", "pid": 600, "start": 7, "job_id": "600", "add_grp_id": 0}
    node = box.node()
    claim(node, record(token="", devices=(), uid=UID, **fields), 1, judging(node), soon())
    return Request(RELEASE, 600, 7)


def give(box: Box, request: Request) -> tuple[str, ...]:
    """Let gpulockd give it back for us."""
    return give_back(box.node(), Peer(os.getpid(), UID, -1, True), request, Deadline(5))


def take_back(box: Box, force: bool = False) -> list[str]:
    """Let `gpulock release` free GPU 0."""
    node = box.node()
    let = cli_release.let_go(node, node.devices(), lambda lock: lock.id == bus(0), force, "x")
    return [one.lock.id for one in let]


def test_gpulockd_gives_nothing_back_before_the_exporter_has_looked_again(box: Box) -> None:
    request = hold_as_process(box)
    tell(box, 300 * MIB, boottime())
    with pytest.raises(Refusal, match="its memory is looked at first"):
        give(box, request)
    assert box.locks() == [bus(0)]
    tell(box, 0, boottime())
    assert give(box, request) == (bus(0),)
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == []


def test_what_gpulockd_gives_back_with_memory_in_use_goes_to_quarantine(box: Box) -> None:
    request = hold_as_process(box)
    tell(box, 300 * MIB, boottime() + LATER)
    assert give(box, request) == (bus(0),)
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == [bus(0)]


def test_a_release_waits_for_that_look_and_keeps_the_device_without_it(box: Box) -> None:
    hold_as_process(box)
    tell(box, 0, boottime())
    with pytest.raises(Refused, match="its memory is looked at first"):
        take_back(box)
    assert box.locks() == [bus(0)]


def test_what_is_released_with_memory_in_use_goes_to_quarantine(box: Box) -> None:
    hold_as_process(box)
    tell(box, 300 * MIB, boottime() + LATER)
    assert take_back(box) == [bus(0)]
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == [bus(0)]


def test_force_asks_nobody(box: Box) -> None:
    hold_as_process(box)
    tell(box, 300 * MIB, boottime() + LATER)
    assert take_back(box, force=True) == [bus(0)]
    assert quarantine.listed(str(box.state), quarantine.QUARANTINE) == []
