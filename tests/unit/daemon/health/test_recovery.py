# SPDX-License-Identifier: Apache-2.0
"""What a check of one device says, what is news, what is remembered, and what brings it back."""

from __future__ import annotations

import pytest

from gpulock.cli.status.attention import quarantine_end_condition
from gpulock.daemon.health.cards import NodeCards
from gpulock.daemon.health.findings import HealthFinding, expire_finding_marks
from gpulock.daemon.health.recovery import (
    ADMIN_RESTORE_ONLY,
    describe_recovery,
    is_end_known,
    is_policy_note,
    merge_note_reasons,
    parse_note_causes,
    was_card_restarted,
)
from gpulock.daemon.reconcile.inventory_file import limit_quarantine
from tests.support.trees import BOOT, OTHER_BOOT, bus

NOTE = {"by": "gpulock", "reason": "xid: XID 79", "boot": BOOT, "since": "50.000"}
MEMORY = {"by": "gpulock", "reason": "health: 3 MiB"}


@pytest.mark.parametrize(
    ("note", "unknown", "known"),
    [
        (NOTE, "", True),
        (NOTE, "sampled", False),
        (NOTE, "restarted", False),
        ({**MEMORY, "reason": "missing: gone"}, "sampled", True),
        ({**MEMORY, "reason": "lost: gone"}, "sampled", False),
        (MEMORY, "sampled", True),
        (MEMORY, "tested", True),
        (MEMORY, "sampled tested", False),
        ({**NOTE, "reason": "health: 3 MiB; xid: XID 79"}, "restarted", False),
        ({**NOTE, "reason": "xid: XID 79; xid: only an administrator brings it back"}, "", False),
        ({**NOTE, "reason": "XID 79"}, "", False),
    ],
)
def test_a_check_counts_where_all_is_known_that_the_cause_wants(
    note: dict[str, str], unknown: str, known: bool
) -> None:
    facts = {name: name not in unknown for name in ("sampled", "restarted", "tested")}
    assert is_end_known(note, **facts) is known


@pytest.mark.parametrize(
    ("boot", "loaded", "anew"),
    [(BOOT, 0.0, False), (BOOT, 50.0, False), (BOOT, 51.0, True), (OTHER_BOOT, 0.0, True)],
)
def test_a_card_that_was_started_again_counts_where_root_has_seen_it(
    boot: str, loaded: float, anew: bool
) -> None:
    cards = NodeCards(boot)
    cards.loaded = loaded
    assert was_card_restarted(NOTE, cards) is anew
    assert not was_card_restarted(MEMORY, cards)
    assert not was_card_restarted({**NOTE, "since": "x"}, NodeCards(BOOT))


def test_what_is_over_will_be_news_again_but_only_where_that_is_known() -> None:
    marks = {("a", "recovery"): 1, ("a", "health"): 1, ("a", "missing"): 1, ("a", "xid 79"): 3}
    stays = {("a", "recovery"): 1, ("a", "xid 79"): 3}
    assert expire_finding_marks(marks, [], [], ["a"]) == stays
    assert expire_finding_marks(marks, [], [], []) == {**stays, ("a", "health"): 1}
    assert expire_finding_marks(marks, [], ["a"], ["a"]) == {("a", "xid 79"): 3}
    for key, left in (("recovery", 4), ("ecc", 1)):
        now = [HealthFinding("a", "ecc", key, 1, "")]
        assert expire_finding_marks({("a", key): 4}, now, ["a"], ["a"]) == {("a", key): left}


@pytest.mark.parametrize(("cards", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (16, 8)])
def test_half_of_the_cards_are_out_at_most_whatever_is_said(cards: int, most: int) -> None:
    said = [bus(number) for number in range(cards)]
    assert len(limit_quarantine(said, [], cards)) == most
    out = [bus(number) for number in range(most)]
    assert limit_quarantine(said, out, cards) == set(out)


def test_instances_of_one_card_are_one_card() -> None:
    said = [f"{bus(0)}.gi{n}.ci0" for n in range(7)]
    assert limit_quarantine([*said, bus(1)], [], 2) == {bus(0)}


AFTER = "a reboot or a reload of the driver, then 3 clean checks"


@pytest.mark.parametrize(
    ("reason", "back"),
    [
        ("xid: XID 79 (off the bus) (gpulock)", AFTER),
        ("health: 3 MiB stay in use after job 12 (gpulock)", "3 clean checks"),
        ("health: 3 MiB; ecc: a row (gpulock)", AFTER),
        (
            f"health: 3 MiB; health: 3 comebacks in a day, {ADMIN_RESTORE_ONLY} (gpulock)",
            "an administrator",
        ),
        ("health: I say so (root)", "an administrator"),
        ("its fan died", "an administrator"),
    ],
)
def test_why_says_what_brings_a_device_back(reason: str, back: str) -> None:
    assert quarantine_end_condition(reason).startswith(back)


def test_what_a_test_wrote_names_no_further_cause() -> None:
    one = HealthFinding("a", "health", "health", 1, "it ended with 3: bad; xid: XID 79")
    assert merge_note_reasons(None, [one], False) == ["health: it ended with 3: bad, xid: XID 79"]


def test_a_cause_that_is_not_known_is_nobodys_to_lift() -> None:
    assert parse_note_causes({"reason": "health: 3 MiB; heat: 99 degrees"}) == ()
    assert not is_policy_note({"by": "gpulock", "reason": "heat: 99 degrees"})
    assert not is_policy_note({"by": "gpulock"})
    assert describe_recovery("") == "an administrator"
