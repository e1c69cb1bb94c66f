# SPDX-License-Identifier: Apache-2.0
"""The state of a device: one word of eight, the most telling one."""

from __future__ import annotations

import pytest

from gpulock.alloc import states
from gpulock.alloc.states import STATES, DeviceState, NodeView
from gpulock.node.devices import Device
from gpulock.store import verdicts
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.pairs import zip_equal
from tests.support.trees import bus, record


def card(number: int, instance: str = "") -> Device:
    return Device(bus(number) + instance, number)


def locked(number: int = 0, **changes: object) -> dict[str, Lock]:
    return {bus(number): Lock(bus(number), record(**changes), "")}


def view(
    held: dict[str, Lock],
    out: dict[str, str] | None = None,
    known: dict[str, Verdict] | None = None,
) -> NodeView:
    made = NodeView()
    made.locks, made.quarantined, made.verdicts = held, out, known
    return made


def one(
    held: dict[str, Lock], verdict: verdicts.State | None = None, **more: object
) -> DeviceState:
    known = {record().token: Verdict(verdict, "proof")} if verdict else None
    out = dict.fromkeys(str(more.get("out", "")).split(), "ECC")
    return states.shown_device_state(
        card(0),
        view(held, out, known),
        frozenset(str(more.get("foreign", "")).split()),
        frozenset(str(more.get("idle", "")).split()),
    )


def test_the_words_and_their_order_are_the_contracts() -> None:
    words = "missing quarantined stale unknown foreign held_idle held free"
    assert " ".join(STATES) == words


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [(ALIVE, "held"), (DEAD, "stale"), (UNKNOWN, "unknown"), (None, "held")],
)
def test_a_lock_is_what_its_verdict_says(verdict: verdicts.State | None, expected: str) -> None:
    assert one(locked(), verdict).state == expected


def shares(*jobs: str) -> dict[str, Lock]:
    names = [f"{bus(0)}.share{number}" for number, _ in enumerate(jobs, 1)]
    owners = [record(job_id=job, token=f"t{job}") for job in jobs]
    return {n: Lock(n, owner, "") for n, owner in zip_equal(names, owners)}


def test_a_shared_card_that_is_gone_is_missing_once() -> None:
    rows = states.device_states([card(1)], view(shares("12", "13")), expected=2)
    assert [(row.id, row.state, len(row.locks())) for row in rows] == [
        (bus(1), "free", 0),
        (bus(0), "missing", 2),
    ]


def test_a_device_without_a_lock_is_free_or_used_by_a_stranger() -> None:
    assert one({}).state == "free"
    assert one({}, foreign=bus(0)).state == "foreign"
    assert one(locked(), foreign=bus(0)).state == "held"


def test_a_card_that_its_mps_closes_is_held_without_a_lock_or_used_by_a_stranger() -> None:
    closed = {bus(0): "MPS of uid 1001 ends on it"}

    def row(held: dict[str, Lock], *foreign: str) -> tuple[str, str]:
        cards = [card(0), card(1)]
        seen = view(held)
        seen.closed = closed
        found = states.device_states(cards, seen, 0, frozenset(foreign))
        assert found[1].state == "free"
        return found[0].state, found[0].reason

    assert row({}) == ("held", "MPS of uid 1001 ends on it")
    assert row(shares("12")) == ("held", "")
    assert row({}, bus(0)) == ("foreign", "MPS of uid 1001 ends on it, but in use by a process")


def test_idle_is_said_only_of_what_is_held() -> None:
    assert one(locked(), ALIVE, idle=bus(0)).state == "held_idle"
    assert one(locked(), DEAD, idle=bus(0)).state == "stale"
    assert one({}, idle=bus(0)).state == "free"


def test_a_shared_card_is_idle_when_all_its_shares_are() -> None:
    first, second = held = shares("12", "13")
    assert one(held, idle=f"{first} {second}").state == "held_idle"
    assert one(held, idle=first).state == "held"
    assert one(held).state == "held"


def test_each_word_gives_way_to_those_before_it() -> None:
    fallen = card(0)
    fallen.fault = "garbage"
    out = {bus(0): "ECC"}
    assert states.classify_device(fallen, locked()[bus(0)], out, None)[0] == "missing"
    assert states.classify_device(card(0), locked()[bus(0)], out, None) == ("quarantined", "ECC")


def test_orphans_are_a_quarantine() -> None:
    left = Verdict(DEAD, "gone")
    left.orphans = "process 7 has it open"
    seen = view(locked(), {}, {record().token: left})
    (row,) = states.device_states([card(0)], seen)
    assert (row.state, row.orphans) == ("quarantined", left.orphans)


def test_a_lock_that_cannot_be_read_is_unknown() -> None:
    for fault in ("its owner record: begins with 'v2'", ""):
        assert one({bus(0): Lock(bus(0), None, fault)}).state == "unknown"


@pytest.mark.parametrize("present", [0, 1, 5, 8])
@pytest.mark.parametrize("lost_lock", [False, True])
def test_the_eight_states_add_up_to_what_the_node_must_have(present: int, lost_lock: bool) -> None:
    cards = [card(n) for n in range(present)]
    held = locked(7) if lost_lock else {}
    rows = states.device_states(cards, view(held), expected=8)
    counted = states.count_device_states(rows)
    assert tuple(counted) == STATES
    assert sum(counted.values()) == 8
    assert counted["missing"] == 8 - present


def test_a_missing_card_that_was_put_out_has_its_bus_id() -> None:
    seen = view(locked(1), {bus(0): "hot", bus(1): "xid", f"{bus(3)}.gi1.ci0": "missing"})
    rows = states.device_states([card(0, ".gi1.ci0")], seen, expected=4)
    assert [(row.id, row.noted) for row in rows if row.state == "missing"] == [
        (bus(1), ""),
        (bus(3), bus(3)),
        ("missing-1", ""),
    ]


def test_instances_of_one_card_are_one_expected_gpu() -> None:
    cards = [card(0, ".gi1.ci0"), card(0, ".gi2.ci0"), card(1)]
    assert (
        states.count_device_states(states.device_states(cards, view({}), expected=3))["missing"]
        == 1
    )


def test_a_card_in_mig_mode_without_a_known_instance_is_out_of_service() -> None:
    device = card(0)
    device.withheld = True
    row = states.shown_device_state(device, view({}))
    assert (row.state, row.reason, row.lacks_instance()) == (
        "quarantined",
        states.NO_INSTANCE,
        True,
    )
