# SPDX-License-Identifier: Apache-2.0
"""The landing page: what is not known is not shown as nothing, and no text is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from gpulock_exporter.page import GIB, Page, Tile, render, spark

HELD = Tile("0", "A100", "held", "0000:07:00.0", "job 4711.3", "alice", "4h 12m", "", 0.97)


class Texts(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_each_device_has_a_tile_with_its_state_in_words() -> None:
    text = render(Page("gpu017", "1", [HELD, Tile("1", "A100", "held_idle")]))
    assert text.count("<article") == 2
    assert "1 held · 1 held-idle" in text
    assert "97%" in text and "job 4711.3 · alice · 4h 12m" in text


@pytest.mark.parametrize("field", ["name", "model", "job", "user", "reason", "place"])
def test_no_text_of_a_user_is_markup(field: str) -> None:
    nasty = "<script>alert('x')</script>\"&"
    changes: dict[str, Any] = {field: nasty}
    tile = replace(HELD, **changes)
    page = Texts(render(Page(nasty, "1", [tile], old=99.0, fault=nasty)))
    assert "script" not in page.tags


def test_nothing_is_fetched_from_outside_and_nothing_is_run() -> None:
    page = Texts(render(Page("gpu017", "1", [HELD])))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("href", "src", "action")]
    assert links == ["/metrics", "/-/healthy"]


@pytest.mark.parametrize(
    ("old", "said"),
    [(None, "No samples"), (75.0, "75 s old"), (600.0, "10 min old"), (2.0, ""), (0.0, "")],
)
def test_old_samples_are_said_plainly(old: float | None, said: str) -> None:
    text = render(Page("gpu017", "1", [HELD], old=old, limit=5.0))
    assert ("role=alert" in text) is bool(said)
    assert said in text


def test_what_is_not_known_is_a_dash_and_not_a_zero() -> None:
    text = render(Page("n", "1", [Tile("0", "A100", "quarantined")]))
    tile = text[text.index("<article") :]
    assert "0%" not in tile and "0.0 of" not in tile and "<svg" not in tile


def test_memory_never_draws_beyond_its_bar() -> None:
    text = render(Page("n", "1", [Tile("0", "", "held", memory_used=99 * GIB, memory_total=GIB)]))
    assert "width:100.0%" in text


def test_a_line_is_broken_where_nothing_was_observed() -> None:
    path = re.search(r'd="([^"]*)"', spark([0.0, 1.0, None, 0.5, 2.0, -1.0], "5 minutes"))
    assert path is not None
    assert path[1].count("M") == 2
    heights = [float(point.split(" ")[1]) for point in re.split("[ML]", path[1])[1:]]
    assert all(0 <= height <= 40 for height in heights)
