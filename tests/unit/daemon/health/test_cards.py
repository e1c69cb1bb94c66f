# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/cards: what is kept of each card, for how long, and who may change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.health.cards import (
    NodeCards,
    parse_cards,
    read_cards,
    save_cards,
)
from gpulock.store.quarantine import CARDS, read_suspect_cards
from tests.support.trees import BOOT, OTHER_BOOT, bus


def filled() -> NodeCards:
    """Return all that can be known."""
    cards = NodeCards(BOOT)
    one = cards.of(bus(0))
    one.found, one.most, one.tested = {"command": "it failed", "memory": ""}, (16, 18), 12.5
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
    assert (tmp_path / CARDS).stat().st_mode & 0o777 == 0o644, "everybody may read it"


def test_of_another_boot_the_comebacks_alone_count() -> None:
    cards = parse_cards(filled().text(), OTHER_BOOT)
    assert cards.backs == [(1.7e9, bus(0))]
    cards.backs = []
    assert cards.text() == NodeCards(OTHER_BOOT).text()


def test_suspects_of_another_boot_are_none(tmp_path: Path) -> None:
    save_cards(str(tmp_path), filled())
    assert read_suspect_cards(str(tmp_path), OTHER_BOOT) == {}
    assert read_suspect_cards(str(tmp_path / "nowhere"), BOOT) == {}


@pytest.mark.parametrize("text", ["", "gpulock-cards 1\nmost x=1\n", "gpulock-cards 2\n", "log="])
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
