# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a card that works, each with evidence, and what is kept of each card."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.core.sample import DeviceSample, parse_sample_fields
from gpulock.daemon.health.cards import NodeCards, read_cards, save_cards
from gpulock.daemon.health.findings import MIB, check_links, check_memory
from gpulock.store.quarantine import CARDS, read_suspect_cards
from tests.support.claims import ask, ids
from tests.support.health_site import Ward
from tests.support.trees import BOOT, OTHER_BOOT, bus


def filled() -> NodeCards:
    """Return all that can be known."""
    cards = NodeCards(BOOT)
    one = cards.of(bus(0))
    one.checks, one.most, one.tested = {"command": "it failed", "memory": ""}, (16, 18), 12.5
    one.suspect = "it = does not answer"
    cards.known, cards.marks = {bus(0), bus(1)}, {(bus(0), "xid 79"): 2}
    cards.sequence, cards.loaded = 4711, 1.5
    cards.xids = {(bus(1), 79): (2, 8.5)}
    cards.backs = [(1.7e9, bus(0))]
    return cards


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    cards = filled()
    assert save_cards(str(tmp_path), cards)
    again = read_cards(str(tmp_path), BOOT)
    assert again.text() == cards.text() == again.stored
    assert read_suspect_cards(str(tmp_path), BOOT) == {bus(0): "it = does not answer"}
    assert read_suspect_cards(str(tmp_path), OTHER_BOOT) == {}
    assert read_suspect_cards(str(tmp_path / "nowhere"), BOOT) == {}
    assert (tmp_path / CARDS).stat().st_mode & 0o777 == 0o644, "everybody may read it"
    assert read_cards(str(tmp_path), OTHER_BOOT).backs == cards.backs, "of any boot"


EMPTY = '{"backs": [], "known": [], "sequence": 0, "loaded": 0, "xids": [], "marks": [], '
HEAD = f"gpulock-cards 1\nboot_id={BOOT}\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpulock-cards 1\nmost x=1\n",
        "gpulock-cards 2\n",
        "log=",
        f'{HEAD}{{"backs": 7}}\n',
        f'{HEAD}{EMPTY}"states": []}}\n',
    ],
)
def test_garbage_is_not_known_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / CARDS).write_text(text)
    cards = read_cards(str(tmp_path), BOOT)
    assert cards.text() == NodeCards(BOOT).text()
    assert save_cards(str(tmp_path), cards)
    assert (tmp_path / CARDS).read_text() == cards.text()


def test_what_another_has_changed_meanwhile_stands(tmp_path: Path) -> None:
    state_dir = str(tmp_path)
    ours = read_cards(state_dir, BOOT)
    other = read_cards(state_dir, BOOT)
    other.known = {bus(0)}
    assert save_cards(state_dir, other)
    ours.of(bus(1)).tested = 5.0
    assert not save_cards(state_dir, ours)
    again = read_cards(state_dir, BOOT)
    assert (again.known, again.states) == ({bus(0)}, {})


GOOD = (
    "looked=100 pcie_width=16 pcie_width_max=16 nvlink_active=18 memory_used=0"
    " processes=0 busy=0 observed=90"
)


def card(facts: str = "") -> DeviceSample:
    """Return a good card's sample with these facts in place of others."""
    pairs: dict[str, str] = {}
    for word in f"{GOOD} {facts}".split():
        key, _, value = word.partition("=")
        pairs[key] = value
    words = [f"{key}={value}" for key, value in pairs.items()]
    return DeviceSample(*parse_sample_fields("device", words))


def failed(facts: str, most: tuple[int, int] = (0, 0), others: str = "") -> dict[str, str]:
    """Return what fails of a free card with these facts beside one neighbour."""
    found = {**check_links(card(facts), [card(others)], most), **check_memory(card(facts))}
    return {name: why for name, why in found.items() if why}


def test_each_check_that_can_be_made_is_made() -> None:
    assert check_links(card(), [], (0, 0)) == {"pcie_width": "", "nvlink_links": ""}
    assert check_memory(card()) == {"memory": ""}
    nothing = DeviceSample({}, {})
    assert check_links(nothing, [nothing], (16, 6)) == check_memory(nothing) == {}


@pytest.mark.parametrize(
    ("facts", "others", "found"),
    [
        ("pcie_width=8", "", {"pcie_width": "x8 on PCIe, and its neighbours have x16"}),
        (f"memory_used={300 * MIB}", "", {"memory": "300 MiB are in use without a process"}),
        ("pcie_width=8", "pcie_width=8", {}),  # the board has such slots
        ("pcie_width=8 pcie_width_max=8", "", {}),
        ("nvlink_active=0", "nvlink_active=18", {}),  # no bridge on this pair
        (f"memory_used={300 * MIB} coherent=1", "", {}),
    ],
)
def test_a_card_that_is_not_as_it_should_be_fails_one_check_and_a_sound_one_none(
    facts: str, others: str, found: dict[str, str]
) -> None:
    assert failed(facts, others=others) == found


def test_lanes_and_nvlinks_count_against_the_most_that_the_card_had_in_this_boot() -> None:
    assert failed("pcie_width=4 pcie_width_max=4 nvlink_active=17", (16, 18)) == {
        "pcie_width": "x4 on PCIe, and x16 before in this boot",
        "nvlink_links": "17 NVLinks are up, and 18 were in this boot",
    }


# --- in gpulockd ----------------------------------------------------------------------------------


WORDS = GOOD.replace("looked=100 ", "").split()


def test_a_degraded_card_is_told_once_and_taken_last_and_stays_in_service(tmp_path: Path) -> None:
    ward = Ward(tmp_path, 2, QUARANTINE_ON="xid missing")
    ward.tell(0, *WORDS, "pcie_width=8")
    ward.tell(1, *WORDS)
    ward.round(2)
    cards = ward.cards().states
    why = "x8 on PCIe, and its neighbours have x16"
    assert cards[bus(0)].failed() == {"pcie_width": why}
    assert cards[bus(1)].failed() == {}
    assert ward.said() == [f"<4>{bus(0)}: {why}"]
    assert ward.suspects() == {bus(0): why}
    assert ids(ask(ward, 1)) == [bus(1)]
    assert ward.out() == []


def test_a_card_that_degrades_each_job_does_not_come_back_whatever_put_it_out(
    tmp_path: Path,
) -> None:
    ward = Ward(tmp_path, 2, QUARANTINE_ON="xid missing")
    ward.tell(1, *WORDS)
    ward.tell(0, *WORDS, "pcie_width=4")
    ward.log_xid(0)
    ward.round()
    ward.reload()
    ward.round(4)
    assert "xid: XID 79" in ward.reason(0)
    ward.tell(0, *WORDS)
    for _ in range(3):
        assert ward.out() == [bus(0)]
        ward.round()
    assert ward.out() == []


def test_the_most_that_a_card_had_outlives_gpulockd_and_no_boot(tmp_path: Path) -> None:
    ward = Ward(tmp_path, 1)
    failed = {"pcie_width": "x8 on PCIe, and x16 before in this boot"}
    for width, act, said in ((16, ward.start, {}), (8, ward.reboot, failed), (8, ward.start, {})):
        ward.tell(0, f"pcie_width={width}", "pcie_width_max=16")
        ward.round()
        assert ward.cards().of(bus(0)).failed() == said
        act()


@pytest.mark.parametrize("sampled", [True, False])
def test_a_check_that_nobody_wants_any_more_is_no_finding(tmp_path: Path, sampled: bool) -> None:
    ward = Ward(tmp_path, 1, HEALTH_COMMAND="/bin/true")
    ward.tell(0, *WORDS)
    cards = ward.cards()
    one = cards.of(bus(0))
    one.checks, one.tested = {"command": "HEALTH_COMMAND: it ended with 1"}, ward.now
    ward.save(cards)
    ward.round(tests=False)
    assert "command" in ward.cards().of(bus(0)).failed()
    assert ward.cards().of(bus(0)).suspect
    del ward.settings["HEALTH_COMMAND"]
    (ward.exporter / "sample").unlink()
    ward.round(sampled=sampled)
    assert (ward.cards().of(bus(0)).failed(), ward.cards().of(bus(0)).suspect) == ({}, "")
