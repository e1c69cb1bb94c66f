# SPDX-License-Identifier: Apache-2.0
"""Devices, locks, verdicts and use at one moment, and the states that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.frame import COLLECTORS, Frame
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.metrics.families import render_families
from gpulock_exporter.state.collector_state import CollectorState, find_lost_cards
from gpulock_exporter.state.snapshot import (
    NOT_IN_NVML,
    DeviceSnapshot,
    LostCard,
    Moment,
    NodeSnapshot,
    steady_offset,
)

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.verdicts import DEAD, Verdict
from tests.support.exporter_nodes import (
    EPOCH,
    Node,
    card,
    facts,
    full_card,
    instance,
    listed,
    lock,
    uuid,
)
from tests.support.trees import BOOT, FakeProc, bus
from tests.unit.exporter.metrics.test_rules import sample_name

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


def state_of(snapshot: NodeSnapshot, name: str = bus(0)) -> str | None:
    return seen(snapshot, name).state


def seen(snapshot: NodeSnapshot, name: str = bus(0)) -> DeviceSnapshot:
    return next(one for one in snapshot.devices if one.id == name)


def values(snapshot: NodeSnapshot, family: str) -> dict[str, float]:
    """Return a family's values by labels."""
    name = f"gpulock_{family}"
    (found,) = [one for one in collect_families(snapshot) if sample_name(one) == name]
    return {
        ",".join(f'{label}="{of}"' for label, of in one.labels.items()): one.value
        for one in found.samples
    }


def states_of(snapshot: NodeSnapshot) -> dict[str, str]:
    """Return the state of each device that has one, by its labels."""
    told = values(snapshot, "gpu_state")
    return {
        name.partition(",state=")[0]: name.partition(",state=")[2].strip('"')
        for name, value in told.items()
        if value == 1
    }


def families_with_values(snapshot: NodeSnapshot) -> set[str]:
    return {sample_name(family) for family in collect_families(snapshot) if family.samples}


def test_a_card_whose_instances_are_not_listed_yet_has_its_state_and_counts_no_memory() -> None:
    node = Node()
    card_in_mig_mode = listed(0)
    card_in_mig_mode.withheld = True
    node.tick(full_card(0, mig=True), instance(0, 1))
    snapshot = node.snapshot([card_in_mig_mode])
    assert list(states_of(snapshot).values()) == ["quarantined"]
    assert snapshot.states is not None and snapshot.states["quarantined"] == 1
    assert seen(snapshot).causes == ("no_instance",)
    assert len(values(snapshot, "gpu_memory_used_bytes")) == 1


def test_idle_since_is_the_last_look_less_the_idle_seconds_that_were_observed() -> None:
    node = Node(idle_after=3.0)
    node.facts = facts(lock(0, A))
    node.tick(card(0))
    worked = node.moment.wall
    for state in ("held", "held", "held_idle", "held_idle", "held_idle"):
        node.tick(card(0, busy=0.005))  # as a desktop works
        assert state_of(node.snapshot([listed(0)])) == state
    told = values(node.snapshot([listed(0)]), "gpu_idle_since_timestamp_seconds")
    assert list(told.values()) == [pytest.approx(worked)]
    for _ in range(5):
        node.tick(card(0, busy=None, observed=None))
    told = values(node.snapshot([listed(0)]), "gpu_idle_since_timestamp_seconds")
    assert list(told.values()) == [pytest.approx(worked + 5)], "nobody saw what it did"
    for _ in range(11):
        node.tick(card(0, busy=None, observed=None))
    assert values(node.snapshot([listed(0)]), "gpu_idle_since_timestamp_seconds") == {}
    node.facts = facts(lock(0, B, scheduler="admin"))
    for _ in range(5):
        node.tick(card(0, busy=0.0))
    assert seen(node.snapshot([listed(0)])).idle_since is None, "a reserve idles never"


def test_old_values_are_dropped_and_locks_stay() -> None:
    node = Node(oldest=10.0, idle_after=1.0)
    node.facts = facts(lock(0, A), verdicts={A: Verdict(DEAD, "")})
    for _ in range(3):
        node.tick(full_card(0, processes={}))
    node.had_xid(0, 79)
    fresh = node.snapshot([listed(0)])
    for _ in range(11):
        node.silence()
    old = node.snapshot([listed(0)])
    assert (fresh.health.nvml_up, old.health.nvml_up) == (True, False)
    kept = {name for name in families_with_values(old) if "_gpu_" in name}
    assert kept == {
        "gpulock_gpu_lock_info",
        "gpulock_gpu_state",
        "gpulock_gpu_lock_acquired_timestamp_seconds",
        "gpulock_gpu_last_busy_timestamp_seconds",
        "gpulock_gpu_xid_errors_total",
        "gpulock_gpu_xid_last_timestamp_seconds",
    }
    assert old.health.sampled == fresh.health.sampled
    assert seen(old).uuid == uuid(0)
    node.tick(full_card(0))
    assert node.snapshot([listed(0)]).health.nvml_up


def test_a_counter_that_cannot_be_read_is_absent_and_goes_on_once_it_can_be() -> None:
    def energy() -> list[float]:
        return list(values(node.snapshot([listed(0)]), "gpu_energy_joules_total").values())

    node = Node(oldest=10.0)
    node.tick(full_card(0, energy=1000.0))
    told = energy()
    for _ in range(10):
        node.tick(full_card(0, energy=None))
    assert energy() == told == [1000.0], "as old as any other value may be"
    node.tick(full_card(0, energy=None))
    snapshot = node.snapshot([listed(0)])
    assert energy() == []
    assert values(snapshot, "gpu_power_watts"), "what can be read is told meanwhile"
    assert values(snapshot, "gpu_ecc_errors_total")
    node.tick(full_card(0, energy=2200.0))
    assert energy() == [2200.0]


def test_without_any_driver_locks_are_told() -> None:
    node = Node(gpus=2)
    node.facts = facts(lock(0, A, uuids=(uuid(0),)))
    node.silence()
    snapshot = node.snapshot([])
    assert snapshot.states is not None
    assert snapshot.states["missing"] == 2
    assert (seen(snapshot).uuid, seen(snapshot).card) == (uuid(0), None)
    assert list(values(snapshot, "gpu_lock_info")) == [
        f'uuid="{uuid(0)}",scheduler="sge",job_id="12",user="alice",queue="gpu.q"'
    ]


def test_where_the_locks_cannot_be_read_nothing_is_said_of_them(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(700)  # it has no claim
    node = Node(proc=str(proc.root))
    node.facts.locks = None
    node.tick(full_card(0, processes={700: None}))
    snapshot = node.snapshot([listed(0)])
    assert (snapshot.states, state_of(snapshot), seen(snapshot).foreign) == (None, None, None)
    names = families_with_values(snapshot)
    assert "gpulock_gpu_utilization_ratio" in names
    node.facts = facts()
    node.put_out(None)  # nor where the quarantine cannot be
    names |= families_with_values(node.snapshot([listed(0)]))
    assert not {"gpulock_gpu_state", "gpulock_gpus"} & names


def test_a_card_that_nvml_does_not_show_is_missing_and_keeps_its_name() -> None:
    node, labels = Node(gpus=3), f'gpu="1",uuid="{uuid(1)}"'
    node.tick(card(0), card(1))
    node.tick(card(0))
    node.had_xid(1, 79)
    listed_still = node.snapshot([listed(0), listed(1)])
    found = seen(listed_still, bus(1))
    assert (found.state, found.reason) == ("missing", NOT_IN_NVML)
    assert listed_still.switch_errors == {}, "gpulockd never saw it well, yet it is no NVSwitch"
    for snapshot in (listed_still, node.snapshot([listed(0)])):
        states = states_of(snapshot)
        assert states == {f'gpu="0",uuid="{uuid(0)}"': "free", labels: "missing"}
        assert snapshot.states is not None
        assert snapshot.states["missing"] == 2  # the third was never seen in this boot
    assert values(listed_still, "gpu_xid_errors_total") == {f'{labels},xid="79"': 1}
    assert labels not in values(listed_still, "gpu_busy_seconds_total")


def test_a_card_whose_calls_hang_is_lost_for_that_since_the_first_time() -> None:
    node, cards = Node(), [bus(0), bus(1)]
    node.tick(card(0), card(1))
    for _ in range(2):
        node.now += 1
        frame = node.frame(card(1), complete=True)
        node.take(frame, hung={bus(0): "it hangs"}, driver_cards=cards)
    assert node.book.memory.lost == {bus(0): LostCard(1002.0, "it hangs")}


@pytest.mark.parametrize(
    ("frame", "driver_cards", "lost"),
    [
        pytest.param(
            Frame(1.0, complete=False, lost={bus(0): "new", bus(1): "lost"}),
            [bus(0), bus(1), bus(2), bus(3)],
            {bus(0): "new", bus(1): "lost"},
            id="a frame calls cards lost, not of all there are",
        ),
        pytest.param(
            Frame(1.0, complete=True), None, {bus(0): "old"}, id="the list cannot be read"
        ),
        pytest.param(Frame(1.0, complete=True), [bus(2)], {}, id="it is taken out of the machine"),
    ],
)
def test_a_card_is_lost_that_a_frame_calls_lost_or_that_was_lost_and_is_listed(
    frame: Frame, driver_cards: list[str] | None, lost: dict[str, str]
) -> None:
    before = {bus(0): LostCard(1000.0, "old")}
    assert find_lost_cards(before, frame, {bus(2)}, driver_cards) == lost


@pytest.mark.parametrize(
    ("note", "causes"),
    [
        ({"reason": "xid: XID 79 (lost); health: 9 MiB", "by": "gpulock"}, {"xid", "health"}),
        ({"reason": "xid: XID 79", "by": "root"}, {"administrator"}),
        ({"reason": "xid: no author noted (gpulock)"}, {"administrator"}),
        ({"reason": "something: new", "by": "gpulock"}, {"administrator"}),
        ({"reason": "unreadable note: no such file"}, {"administrator"}),
    ],
)
def test_why_a_device_is_out_is_one_of_few_words(note: dict[str, str], causes: set[str]) -> None:
    node, missing = Node(), listed(0)
    missing.fault = "garbage"
    node.put_out({bus(0): note})
    node.silence()
    for device, state in ((listed(0), "quarantined"), (missing, "missing")):
        found = seen(node.snapshot([device]))
        assert (found.state, set(found.causes or ())) == (state, causes)


# --- processes --------------------------------------------------------------------------------


def test_process_lists_are_looked_up_when_they_are_new_and_when_the_holder_is(
    tmp_path: Path,
) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(77, groups=(65400,))
    asked: list[int] = []

    def kin() -> ProcessScan:
        asked.append(1)
        return ProcessScan(Proc(str(proc.root)))

    node = Node()
    node.book = CollectorState(BOOT, Settings({}), kin)
    node.facts = facts(lock(0, A))
    node.tick(card(0, processes={77: None}))
    node.tick(card(0))
    assert (len(asked), seen(node.snapshot([listed(0)])).foreign) == (1, 0)
    node.facts = facts()
    node.tick(card(0))
    assert (len(asked), seen(node.snapshot([listed(0)])).foreign) == (2, 1)
    assert state_of(node.snapshot([listed(0)])) == "foreign"
    proc.remove(77)
    node.silence()
    assert state_of(node.snapshot([listed(0)])) == "foreign", "until the next list"
    node.silence(node.book.settings.max_sample_age)
    assert state_of(node.snapshot([listed(0)])) == "free", "no list comes that says so"
    node.tick(card(0, processes={}))
    assert seen(node.snapshot([listed(0)])).foreign == 0
    node.tick(card(1))
    assert seen(node.snapshot([listed(0)])).foreign is None


def test_hidden_processes_are_not_foreign_and_not_none_either() -> None:
    node = Node(proc="/nonexistent")
    node.tick(card(0, processes={77: None}))
    one = seen(node.snapshot([listed(0)]))
    assert (one.foreign, node.book.present()[bus(0)].unseen, one.state) == (None, 1, "free")


# --- the rest ---------------------------------------------------------------------------------


def test_collectors_tell_of_the_worker_while_it_is_heard() -> None:
    node = Node()
    node.now += 1
    frame = node.frame(card(0), failures={"ecc": "no permission", "x": "y"})
    node.facts.sources, node.facts.failures = {"locks"}, {"verdicts": "gone"}
    node.take(frame)
    found = node.snapshot([listed(0)]).health.collectors
    del found["foreign"]  # type: ignore[attr-defined]  # pyright: ignore[reportIndexIssue]
    own = {"locks": "", "verdicts": "gone", "ecc": "no permission"}
    assert found == {**dict.fromkeys(COLLECTORS, ""), **own}
    for _ in range(11):
        node.silence()
    assert "power" not in node.snapshot([listed(0)]).health.collectors


def test_an_event_has_one_time_however_the_clocks_drift() -> None:
    offset = steady_offset(None, Moment(100.0, EPOCH + 100))
    assert steady_offset(offset, Moment(200.0, EPOCH + 200.01)) == offset == EPOCH
    assert steady_offset(offset, Moment(200.0, EPOCH + 3800)) == EPOCH + 3600


def test_a_process_list_that_comes_no_more_is_not_told_for_ever() -> None:
    node = Node(process_period=1.0, oldest=3.0)
    node.tick(card(0, processes={}))
    assert node.book.present()
    for _ in range(5):
        node.tick(card(0))
    assert node.book.present(), "the next one is not due yet"
    node.tick(card(0))
    assert not node.book.present()


def test_what_was_told_of_a_tick_does_not_change_later() -> None:
    node = Node()
    node.facts = facts(lock(0, A))
    node.had_xid(0, 63)
    node.tick(full_card(0), full_card(1))
    node.tick(full_card(0), full_card(1))
    told = node.snapshot([listed(0), listed(1)])
    before = render_families(collect_families(told))
    node.facts = facts(lock(1, B))
    node.tick(full_card(0, busy=1.0, energy=99_999.0), full_card(1))
    node.silence(20)
    node.snapshot([listed(0)])
    assert render_families(collect_families(told)) == before
