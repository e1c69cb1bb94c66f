# SPDX-License-Identifier: Apache-2.0
"""The landing page: what is not known is not shown as nothing, and no text is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.metrics.labels import LabelUser
from gpulock_exporter.web.page import GIB, Page, Tile, render_page, render_tile_sparkline
from gpulock_exporter.web.utilisation_history import (
    HOT,
    LENGTH,
    SHOWN,
    UtilizationHistory,
    build_page,
    device_note,
)

from gpulock.store.reservations import Reservation
from tests.support.exporter_nodes import EPOCH, Node, card, facts, instance, listed, lock
from tests.support.trees import BOOT, FakeProc
from tests.unit.exporter.metrics.test_rules import named

HELD = Tile("0", "A100", "held", "0000:07:00.0", "job 4711.3", "alice", "4h 12m", utilization=0.97)


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
    text = render_page(Page("gpu017", "1", [HELD, Tile("1", "A100", "held_idle")]))
    assert text.count("<article") == 2
    assert "<title>gpu017: 1 held, 1 held-idle</title>" in text
    assert "97%" in text and ">job 4711.3 · alice<" in text and ">4h 12m<" in text


def test_how_many_are_free_is_said_first() -> None:
    tiles = [HELD, *(Tile(str(number), "A100", "free") for number in (1, 2))]
    assert "<h1>n</h1><p><b>2</b> of 3 free</p><ul><li" in render_page(Page("n", "1", tiles))
    assert "No GPU is known here." in render_page(Page("n", "1", []))


def test_the_instances_of_a_card_stand_together_below_its_name() -> None:
    parts = [Tile(f"gi{n}.ci0", "1g.10gb", "free", card="GPU 0 A100") for n in (1, 2)]
    text = render_page(Page("n", "1", [*parts, HELD]))
    assert "<h2>GPU 0 A100 <span>2 MIG instances, 2 free</span></h2>" in text
    assert text.count("<h2") == 1


@pytest.mark.parametrize("field", ["name", "model", "job", "user", "held", "note", "place", "card"])
def test_no_text_of_a_user_is_markup(field: str) -> None:
    nasty = "<script>alert('x')</script>\" onload='x' onload=\"x&"
    changes: dict[str, Any] = {field: nasty}
    tile = replace(HELD, **changes)
    page = Texts(render_page(Page(nasty, "1", [tile], old=99.0, fault=nasty)))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_nothing_is_fetched_from_outside_and_nothing_is_run() -> None:
    page = Texts(render_page(Page("gpu017", "1", [HELD])))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("href", "src", "action")]
    assert links == ["/", "/?live", "/metrics", "/-/healthy"]


@pytest.mark.parametrize(
    ("old", "said"),
    [(None, "No samples yet."), (75.0, "75 s old"), (600.0, "10 min old"), (2.0, ""), (0.0, "")],
)
def test_old_samples_are_said_plainly(old: float | None, said: str) -> None:
    text = render_page(Page("gpu017", "1", [HELD], old=old, limit=5.0))
    assert ("role=alert" in text) is bool(said)
    assert said in text


def test_what_is_not_known_is_said_to_be_so_and_not_a_zero() -> None:
    text = render_page(Page("n", "1", [Tile("0", "A100", "quarantined")]))
    tile = text[text.index("<article") :]
    assert "use not observed" in tile
    assert "0%" not in tile and "0.0 of" not in tile and "<svg" not in tile


def test_instances_are_shown_in_order_of_their_numbers() -> None:
    node = Node()
    parts = [instance(1, gi) for gi in (10, 2, 1)]
    node.tick(card(1, mig=True, name="A100"), card(0), *parts)
    page = build_page(node.snapshot(), UtilizationHistory(), "n", LabelUser.NAME)
    assert [tile.name for tile in page.tiles] == ["0", "gi1.ci0", "gi2.ci0", "gi10.ci0"]
    assert {tile.model for tile in page.tiles[1:]} == {"1g.10gb"}


@pytest.mark.parametrize(
    ("idle", "seen", "note"),
    [(700.0, (), "observed to do nothing for 11m"), (None, (7, 8), "2 foreign processes")],
)
def test_a_note_says_since_when_and_how_many(
    idle: float | None, seen: tuple[int, ...], note: str
) -> None:
    node = Node()
    node.tick(card(0))
    (device,) = node.snapshot().devices
    since = None if idle is None else node.moment.wall - idle
    changes: dict[str, Any] = {"state": "held_idle" if idle else "foreign", "idle_since": since}
    assert device_note(replace(device, foreign=len(seen), **changes), node.moment) == note


def tile_of(node: Node, **changes: Any) -> Tile:
    """Return the tile of a node's only card."""
    snapshot = node.snapshot([listed(0)])
    (device,) = snapshot.devices
    changed = replace(snapshot, devices=(replace(device, **changes),))
    page = build_page(changed, UtilizationHistory(), "n", LabelUser.NAME, BOOT)
    (tile,) = page.tiles
    return tile


def test_a_tile_names_each_check_that_fails_and_what_the_driver_says_once() -> None:
    node = Node()
    node.tick(card(0))
    action = "the driver asks for a reset of the GPU"
    checks = {
        "command": "HEALTH_COMMAND: it ended with 3",
        "memory": "",
        "pcie_width": "x4 on PCIe",
        "recovery_action": action,
    }
    tile = tile_of(node, checks=checks, recovery_action=1)
    assert tile.warnings == (checks["command"], checks["pcie_width"], action)


@pytest.mark.parametrize(
    ("xid", "said"), [(79, ("XID 79 (GPU has fallen off the bus), 2m ago",)), (31, ())]
)
def test_a_card_that_had_an_xid_of_its_own_is_marked(xid: int, said: tuple[str, ...]) -> None:
    node = Node()
    node.tick(card(0))
    node.had_xid(0, xid)
    node.tick(card(0), seconds=125)
    tile = tile_of(node)
    assert (tile.state, tile.warnings) == ("free", said)
    text = render_page(Page("n", "1", [tile, HELD]))
    assert ('<article class="free sick">' in text) is bool(said)
    assert ("<b>1</b> with a fault" in text) is bool(said)
    assert all(f"<p class=warn>{one}</p>" in text for one in said)


def test_what_is_wrong_with_a_card_is_said_of_its_instances() -> None:
    node = Node()
    node.tick(card(0, mig=True, temperature=97.0), instance(0, 1), card(1))
    page = build_page(node.snapshot(), UtilizationHistory(), "n", LabelUser.NAME)
    assert [tile.warnings for tile in page.tiles] == [("97 °C is hot",), ()]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 97.0}, "97 °C is hot"),
        ({"recovery_action": 1}, "the driver asks for a reset of the GPU"),
        ({"remap_failure": True}, "a row of its memory could not be remapped"),
    ],
)
def test_what_is_wrong_with_a_card_is_said(changes: dict[str, Any], said: str) -> None:
    node = Node()
    node.tick(card(0))
    assert tile_of(node, **changes).warnings == (said,)
    sound = {"temperature": 88.0, "recovery_action": 0, "remap_failure": False}
    assert tile_of(node, **sound).warnings == ()


def test_the_temperature_that_is_hot_is_that_of_the_alert() -> None:
    assert f"gpulock_gpu_temperature_celsius > {HOT:g}" in named("alert")["GpulockGpuHot"]["expr"]


def test_a_reserve_says_why() -> None:
    node = Node()
    node.facts = facts(lock(0, scheduler="admin", comment="fan <2>", user="root"))
    node.tick(card(0))
    assert tile_of(node).note == "fan <2>"
    node.facts = facts(lock(0, scheduler="sge", comment="of a job"))
    node.tick(card(0))
    assert tile_of(node).note == ""


def test_the_mean_since_the_lock_is_told_of_what_was_observed() -> None:
    node = Node()
    node.facts = facts(lock(0, claimed_boottime=node.now))
    node.tick(card(0, busy=1.0, observed=1.0))
    node.tick(card(0, busy=1.0, observed=1.0))
    node.tick(card(0, busy=0.25, observed=1.0))
    tile = tile_of(node)
    assert tile.mean == pytest.approx(0.75, abs=0.13)
    assert f"<p class=small>mean {tile.mean:.0%} since the lock</p>" in render_page(
        Page("n", "1", [tile])
    )
    node.facts = facts()
    node.tick(card(0))
    assert tile_of(node).mean is None


def test_a_reader_chooses_whether_the_page_loads_itself_again() -> None:
    still, live = (render_page(Page("n", "1", [HELD], live=live)) for live in (False, True))
    assert "http-equiv" not in still + live
    assert '<a href=/>reload</a> · <a href="/?live">reload every 5 s</a>' in still
    assert "<a href=/>stand still</a>" in live


def test_memory_never_draws_beyond_its_bar() -> None:
    text = render_page(
        Page("n", "1", [Tile("0", "", "held", memory_used=99 * GIB, memory_total=GIB)])
    )
    assert "width:100.0%" in text


def test_a_line_is_broken_where_nothing_was_observed() -> None:
    paths = re.findall(
        r'd="([^"]*)"', render_tile_sparkline([0.0, 1.0, None, 0.5, None, 2.0, -1.0], "5 minutes")
    )
    assert [path.count("M") for path in paths] == [3, 3]
    assert "h0" in paths[1], "a single look is a dot"
    for point in re.findall(r"[\d.]+ ([-\d.]+)", "".join(paths)):
        assert 0 <= float(point) <= 40


def test_a_line_is_as_long_as_what_was_seen_and_ends_now() -> None:
    history = UtilizationHistory()
    for _ in range(LENGTH // 10):
        history.add({"gone": 1.0})
    for second in range(LENGTH // 2):
        history.add({"a": second / LENGTH, "b": None})
    line = history.of("a")
    assert len(line) == SHOWN
    assert line[: SHOWN // 2] == [None] * (SHOWN // 2)
    known = [value for value in line[SHOWN // 2 :] if value is not None]
    assert len(known) == SHOWN // 2 and known == sorted(known)
    assert history.of("b") == [None] * SHOWN
    assert history.of("gone") == [None] * SHOWN, "a device that is gone is forgotten"
    for _ in range(LENGTH):
        history.add({"a": 1.0})
    assert history.of("a") == [1.0] * SHOWN


def test_locks_that_cannot_be_read_are_said_and_no_device_is_left_out() -> None:
    node = Node()
    node.facts.locks = None
    node.facts.failures["locks"] = "no such <folder>"
    node.tick(card(0), card(1, mig=True), instance(1, 1))
    page = build_page(node.snapshot(), UtilizationHistory(), "n", LabelUser.NAME)
    assert [(tile.name, tile.state) for tile in page.tiles] == [
        ("0", "unknown"),
        ("gi1.ci0", "unknown"),
    ]
    text = render_page(page)
    assert "Who holds what is not known: no such &lt;folder&gt;" in text
    assert "0</b> of 2 free" in text


def test_a_shared_device_names_all_its_jobs() -> None:
    node = Node()
    node.facts = facts(
        lock(0, "a" * 16, "share1", job_id="12"),
        lock(0, "b" * 16, "share2", job_id="13", user="bob"),
    )
    node.tick(card(0))
    page = build_page(node.snapshot([listed(0)]), UtilizationHistory(), "n", LabelUser.NAME, BOOT)
    (tile,) = page.tiles
    assert (tile.job, tile.user, tile.state) == ("shared by job 12, job 13", "alice, bob", "held")


def test_of_a_shared_device_each_holder_is_named_once_with_its_own_work(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(701, groups=[65401])
    node = Node(proc=str(proc.root))
    process: dict[str, Any] = {"scheduler": "process", "job_id": "99", "pid": 99, "sid": 99}
    node.facts = facts(
        lock(0, "a" * 16, "share1", job_id="12", add_grp_id=65401),
        lock(0, "a" * 16, "share2", job_id="12", add_grp_id=65401),
        lock(0, "b" * 16, "share3", **process),
    )
    node.tick(card(0))
    node.tick(card(0, process_use={"701": 0.4}))
    page = build_page(node.snapshot([listed(0)]), UtilizationHistory(), "n", LabelUser.NAME, BOOT)
    assert [tile.job for tile in page.tiles] == ["shared by job 12 (40%), pid 99 (0%)"]


def test_a_lock_of_an_earlier_boot_is_as_old_as_the_wall_clock_says() -> None:
    node = Node()
    changes: dict[str, Any] = {
        "claimed_at": EPOCH + node.now - 7200,
        "claimed_boottime": 9e8,
        "boot_id": "other",
    }
    node.facts = facts(lock(0, **changes))
    node.tick(card(0))
    page = build_page(node.snapshot([listed(0)]), UtilizationHistory(), "n", LabelUser.NAME, BOOT)
    assert [tile.held for tile in page.tiles] == ["02:00"]


def test_what_became_of_gpus_is_listed_and_is_no_markup() -> None:
    steps = ["2026-11-23 07:01  0000:01:00.0  out: xid: XID 79 <b>"]
    text = render_page(Page("n", "1", [HELD], steps=steps))
    assert "<h2>Health</h2>" in text and "out: xid: XID 79 &lt;b&gt;" in text
    assert "<h2>Health</h2>" not in render_page(Page("n", "1", [HELD]))


def test_what_is_reserved_is_shown_with_the_user_as_the_metrics_name_it() -> None:
    one = Reservation("0000:06:00.0", 1001, (1e9, 2e9), "alice", "<thesis>")
    node = Node()
    node.tick(card(0))
    snapshot = replace(node.snapshot([listed(0)]), reservations=(one,))
    for label, user in ((LabelUser.NAME, "alice"), (LabelUser.NONE, "a user")):
        text = render_page(build_page(snapshot, UtilizationHistory(), "n", label))
        assert f": reserved for {user} from " in text
        assert "&lt;thesis&gt;" in text


def test_who_waits_is_shown_with_its_reason() -> None:
    text = render_page(Page("n", "1", [HELD], waiting=["alice waits 5m for 2 GPUs: <none>"]))
    assert "<h2>Queue</h2><p class=small>alice waits 5m for 2 GPUs: &lt;none&gt;</p>" in text
    assert "Queue" not in render_page(Page("n", "1", [HELD]))
