# SPDX-License-Identifier: Apache-2.0
"""What a check of one device says, what is news, and what is remembered for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.daemon.health.cards import NodeCards
from gpulock.daemon.health.findings import (
    CAUSES,
    HealthFinding,
    expire_finding_marks,
    findings_from_sample,
    select_new_findings,
)
from gpulock.daemon.health.recovery import (
    is_device_clean,
    was_card_restarted,
)
from gpulock.daemon.reconcile.exporter_limit import limit_exporter_quarantine
from gpulock.node import sample
from gpulock.node.devices import Device
from gpulock.store import kv
from tests.support.trees import BOOT, OTHER_BOOT, bus

NOTE = {"by": "gpulock", "reason": "xid: XID 79", "boot": BOOT, "since": "50.000"}
MEMORY = {"by": "gpulock", "reason": "memory: 3 MiB"}


def seen(**values: object) -> sample.DeviceSample:
    return sample.DeviceSample(values, {})


@pytest.mark.parametrize(
    ("note", "about", "clean"),
    [
        (NOTE, {}, True),
        (NOTE, {"seen": None}, None),
        (NOTE, {"seen": seen(recovery_action=1)}, False),
        (NOTE, {"seen": seen(remap_failure=1)}, False),
        (NOTE, {"seen": seen(recovery_action=0)}, True),
        (NOTE, {"restarted": False}, None),
        (NOTE, {"memory": "3 MiB"}, True),
        (MEMORY, {}, True),
        (MEMORY, {"memory": "3 MiB"}, False),
        (MEMORY, {"memory": None}, None),
        ({**MEMORY, "reason": "missing: gone"}, {"seen": None}, True),
        ({**NOTE, "reason": "memory: 3 MiB; xid: XID 79"}, {"memory": None}, None),
        ({**NOTE, "reason": "memory: 3 MiB; xid: XID 79"}, {"memory": "3 MiB"}, False),
        ({**NOTE, "reason": "xid: XID 79; xid: only an administrator brings it back"}, {}, None),
        ({**NOTE, "reason": "XID 79"}, {}, None),
    ],
)
def test_a_check_says_clean_not_clean_or_nothing(
    note: dict[str, str], about: dict[str, object], clean: bool | None
) -> None:
    well: dict[str, Any] = {"seen": seen(), "memory": "", "restarted": True}
    assert is_device_clean(note, **{**well, **about}) is clean


@pytest.mark.parametrize(
    ("boot", "loaded", "anew"),
    [(BOOT, 0.0, False), (BOOT, 50.0, False), (BOOT, 51.0, True), (OTHER_BOOT, 0.0, True)],
)
def test_a_card_that_was_started_again_counts_where_root_has_seen_it(
    boot: str, loaded: float, anew: bool
) -> None:
    cards = NodeCards(boot)
    cards.xids.loaded = loaded
    assert was_card_restarted(NOTE, cards) is anew
    assert not was_card_restarted(MEMORY, cards)
    assert not was_card_restarted({**NOTE, "since": "x"}, NodeCards(BOOT))


def found(key: str, mark: int, device: str = "a") -> HealthFinding:
    return HealthFinding(device, "xid", key, mark, "")


@pytest.mark.parametrize(
    ("key", "mark", "known", "fresh"),
    [
        ("xid 79", 1, 0, True),
        ("xid 79", 1, 1, False),
        ("xid 79", 2, 1, True),
        ("xid 79", 1, 2, False),
        ("recovery", 1, 2, True),
        ("recovery", 2, 1, True),
        ("recovery", 2, 2, False),
    ],
)
def test_events_are_news_when_there_are_more_and_states_when_they_are_others(
    key: str, mark: int, known: int, fresh: bool
) -> None:
    assert bool(select_new_findings([found(key, mark)], {("a", key): known})) is fresh


def test_what_is_over_will_be_news_again_but_only_where_all_was_told() -> None:
    done = {("a", "recovery"): 1, ("a", "memory"): 1, ("a", "missing"): 1, ("a", "xid 79"): 3}
    unseen = {key: n for key, n in done.items() if key[1] != "missing"}
    assert expire_finding_marks(done, [], [], [], []) == unseen
    assert expire_finding_marks(done, [], ["a"], [], ["a"]) == {("a", "memory"): 1}
    assert ("a", "memory") not in expire_finding_marks(done, [], [], ["a"], [])
    left = expire_finding_marks(done, [found("xid 79", 2)], ["a"], ["a"], ["a"])
    assert left == {("a", "xid 79"): 2}


@pytest.mark.parametrize(("cards", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (16, 8)])
def test_half_of_the_cards_are_out_at_most_whatever_is_said(cards: int, most: int) -> None:
    said = [bus(number) for number in range(cards)]
    assert len(limit_exporter_quarantine(said, [], cards)) == most
    out = [bus(number) for number in range(most)]
    assert limit_exporter_quarantine(said, out, cards) == set(out)


def test_instances_of_one_card_are_one_card() -> None:
    said = [f"{bus(0)}.gi{n}.ci0" for n in range(7)]
    assert limit_exporter_quarantine([*said, bus(1)], [], 2) == {bus(0)}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["device", "gone", "token", "x.79=1", ""]),
            st.sampled_from([bus(0), bus(3), f"{bus(1)}.gi1.ci0", bus(9), "..", "a/b", ""]),
            st.lists(
                st.text("x.c79ecunortd=,0123456789-+e\x1b ;:/", max_size=24)
                | st.sampled_from(["x.79=3,1", "recovery_action=4", "remap_failure=1"]),
                max_size=4,
            ),
        ),
        max_size=12,
    )
)
def test_whatever_a_sample_says_it_speaks_of_devices_of_this_node_alone(
    lines: list[tuple[str, str, list[str]]],
) -> None:
    text = "\n".join([sample.SAMPLE_LINE, *(" ".join([a, b, *c]) for a, b, c in lines)])
    devices = [Device(bus(number), number) for number in range(4)]
    said = list(
        findings_from_sample(sample.parse_sample(text, sample.SAMPLE_LINE), devices, CAUSES)
    )
    assert {one.device for one in said} <= {bus(0), bus(3)}
    assert all(
        one.mark > 0 and kv.is_single_line(one.words) and ";" not in one.words for one in said
    )
    assert len(limit_exporter_quarantine([one.device for one in said], [], 4)) <= 2
