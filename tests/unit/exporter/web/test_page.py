# SPDX-License-Identifier: Apache-2.0
"""The landing page: what is not known is not shown as nothing, and no text is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from gpulock_exporter.metrics.families import LabelUser
from gpulock_exporter.state.snapshot import NodeSnapshot
from gpulock_exporter.web.page import HOT, PageOptions, render_page
from gpulock_exporter.web.utilisation_history import (
    LENGTH,
    SHOWN,
    UtilizationHistory,
    render_sparkline,
)

from gpulock.store.owner import Owner
from gpulock.store.reservations import Reservation
from gpulock.workstation.waiting import WaitingCaller
from tests.support.exporter_nodes import EPOCH, Node, card, facts, instance, listed, lock
from tests.support.trees import BOOT
from tests.unit.exporter.metrics.test_rules import named

ACTION = "the driver asks for gpu_reset"
NASTY = "<script>alert('x')</script>\" onload='x' onload=\"x&"


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


def node_of(*seen: Any, **about: Any) -> Node:
    """Return a node that has looked at these once."""
    node = Node(**about)
    node.tick(*(seen or (card(0),)))
    return node


def html(snapshot: NodeSnapshot, **about: Any) -> str:
    """Return the page of a moment."""
    return render_page(snapshot, UtilizationHistory(), PageOptions("gpu017", boot_id=BOOT, **about))


def changed(node: Node, **changes: Any) -> NodeSnapshot:
    """Return a node's moment, with other values of its first device."""
    snapshot = node.snapshot()
    first, *others = snapshot.devices
    return replace(snapshot, devices=(replace(first, **changes), *others))


def shown(kind: str, text: str) -> list[str]:
    """Return the texts of a kind of paragraph."""
    return re.findall(rf"<p class={kind}>(.*?)</p>", text)


def test_each_device_has_a_tile_with_its_state_in_words() -> None:
    node = node_of(card(0, utilization=0.97), card(1))
    node.facts = facts(lock(0, job_id="4711", task_id="3"))
    text = html(changed(node, state="held_idle"))
    assert text.count("<article") == 2
    assert "<title>gpu017: 1 free, 1 held-idle</title>" in text
    assert "<h1>gpu017</h1><p><b>1</b> of 2 free</p><ul><li" in text
    assert "No GPU is known here." in html(Node().snapshot())
    assert all(words in text for words in ("97%", ">job 4711.3 · alice<", ">1m<", "width:12.5%"))


def test_the_instances_of_a_card_stand_together_in_order_below_its_name() -> None:
    parts = [instance(1, gi, name="A100") for gi in (10, 2, 1)]
    text = html(node_of(card(1, mig=True, name="A100"), card(0), *parts).snapshot())
    assert "<h2>GPU 1 A100 <span>3 MIG instances, 3 free</span></h2>" in text
    assert text.count("<h2") == 1
    assert re.findall(r"<article.*?<b>(.*?)</b>", text) == ["0", "gi1.ci0", "gi2.ci0", "gi10.ci0"]
    assert "<span title='1g.10gb'>1g.10gb</span>" in text


@pytest.mark.parametrize("field", ["gpu_label", "name", "profile", "id", "state", "reason"])
def test_no_text_of_a_user_is_markup(field: str) -> None:
    node = node_of(card(0))
    node.facts = facts(lock(0, user=NASTY, job_id=NASTY))
    page = Texts(html(changed(node, **{field: NASTY}), fault=NASTY, limit=-1.0))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_nothing_is_fetched_from_outside_and_nothing_is_run() -> None:
    page = Texts(html(node_of().snapshot()))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("href", "src", "action")]
    assert links == ["/", "/?live", "/metrics", "/-/healthy"]


@pytest.mark.parametrize(
    ("old", "said"),
    [(None, "No samples yet."), (75.0, "1m old"), (600.0, "10m old"), (2.0, ""), (0.0, "")],
)
def test_old_samples_are_said_plainly(old: float | None, said: str) -> None:
    snapshot = node_of().snapshot()
    sampled = None if old is None else snapshot.at.wall - old
    text = html(replace(snapshot, health=replace(snapshot.health, sampled=sampled)), limit=5.0)
    assert ("role=alert" in text) is bool(said)
    assert said in text


def test_what_is_not_known_is_said_to_be_so_and_not_a_zero() -> None:
    nothing = {"utilization": None, "memory_used": None, "memory_total": None}
    text = html(changed(node_of(), **nothing))
    tile = text[text.index("<article") :]
    assert "use not observed" in tile
    assert "0%" not in tile and "0.0 of" not in tile and "<svg" not in tile


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"state": "held_idle", "idle_since": 700.0}, "observed to do nothing for 11m"),
        ({"state": "foreign", "foreign": 2}, "2 foreign processes"),
        ({"state": "held", "foreign": 1, "owner": Owner()}, "1 foreign process beside the owner"),
        ({"owner": Owner(scheduler="admin", comment="fan <2>")}, "fan &lt;2&gt;"),
        ({"owner": Owner(scheduler="sge", comment="of a job")}, ""),
        ({"state": "quarantined", "reason": "its fan"}, "its fan"),
    ],
)
def test_a_note_says_why_since_when_and_how_many(changes: dict[str, Any], note: str) -> None:
    node = node_of()
    if "idle_since" in changes:
        changes = {**changes, "idle_since": node.moment.wall - changes["idle_since"]}
    notes = shown("note", html(changed(node, **changes)))
    assert [one.partition("&#x27;")[0] for one in notes] == ([note] if note else [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 97.0}, ["97 °C is hot"]),
        (  # each check that fails, and what the driver says once
            {
                "checks": {"memory": "", "pcie_width": "x4 on PCIe", "recovery_action": ACTION},
                "recovery_action": 1,
            },
            ["x4 on PCIe", ACTION],
        ),
        ({"remap_failure": True}, ["a row of its memory could not be remapped"]),
        ({"temperature": 88.0, "recovery_action": 0, "remap_failure": False}, []),
        ({"xids": {79: (1, 0.0)}}, ["XID 79 (GPU has fallen off the bus), 2m ago"]),
        ({"xids": {31: (1, 0.0)}}, []),
    ],
)
def test_what_is_wrong_with_a_card_is_said(changes: dict[str, Any], said: list[str]) -> None:
    node = node_of()
    if "xids" in changes:
        at = node.moment.wall - 125
        changes = {"xids": {xid: (1, at) for xid in changes["xids"]}}
    text = html(changed(node, **changes))
    assert shown("warn", text) == said
    assert ("<b>1</b> with a fault" in text) is ('class="free sick"' in text) is bool(said)


def test_what_is_wrong_with_a_card_is_said_of_its_instances() -> None:
    node = node_of(card(0, mig=True, temperature=97.0), instance(0, 1), card(1))
    assert shown("warn", html(node.snapshot())) == ["97 °C is hot"]


def test_the_temperature_that_is_hot_is_that_of_the_alert() -> None:
    assert f"gpulock_gpu_temperature_celsius > {HOT:g}" in named("alert")["GpulockGpuHot"]["expr"]


def test_the_mean_since_the_lock_is_told_of_what_was_observed() -> None:
    node = node_of()
    node.facts = facts(lock(0, claimed_boottime=node.now))
    for busy in (1.0, 1.0, 0.25):
        node.tick(card(0, busy=busy, observed=1.0))
    assert "mean 62% since the lock" in shown("small", html(node.snapshot()))
    node.facts = facts()
    node.tick(card(0))
    assert "since the lock" not in html(node.snapshot())


def test_a_line_is_broken_where_nothing_was_observed() -> None:
    paths = re.findall(r'd="([^"]*)"', render_sparkline([0.0, 1.0, None, 0.5, None, 1.0]))
    assert [path.count("M") for path in paths] == [3, 3]
    assert "h0" in paths[1], "a single look is a dot"
    for point in re.findall(r"[\d.]+ ([-\d.]+)", "".join(paths)):
        assert 0 <= float(point) <= 40


def test_a_line_is_as_long_as_what_was_seen_and_ends_now() -> None:
    history = UtilizationHistory()
    history.add({"gone": 1.0, "hung": 1.0})
    for second in range(LENGTH // 2):
        history.add({"a": second / LENGTH, "b": None})
    line = history.of("a")
    assert len(line) == SHOWN
    assert line[: SHOWN // 2] == [None] * (SHOWN // 2)
    known = [value for value in line[SHOWN // 2 :] if value is not None]
    assert len(known) == SHOWN // 2 and known == sorted(known)
    assert history.of("b") == [None] * SHOWN
    history.add({"hung": 1.0})
    kept = [value for value in history.of("hung") if value is not None]
    assert kept == [1.0, 1.0], "what did not answer for a while goes on where it was"
    for _ in range(LENGTH):
        history.add({"a": 1.0})
    assert history.of("a") == [1.0] * SHOWN
    assert "gone" not in repr(vars(history)), "a device that is gone is forgotten"


def test_locks_that_cannot_be_read_are_said_and_no_device_is_left_out() -> None:
    node = Node()
    node.facts.locks = None
    node.facts.failures["locks"] = "no such <folder>"
    node.tick(card(0), card(1, mig=True), instance(1, 1))
    text = html(node.snapshot())
    assert re.findall(r'<article class="unknown">.*?<b>(.*?)</b>', text) == ["0", "gi1.ci0"]
    assert "Who holds what is not known: no such &lt;folder&gt;" in text
    assert "0</b> of 2 free" in text


def test_of_a_shared_device_each_holder_is_named_once() -> None:
    node = Node()
    process: dict[str, Any] = {"scheduler": "process", "job_id": "99", "pid": 99, "sid": 99}
    node.facts = facts(
        lock(0, "a" * 16, "share1", job_id="12", add_grp_id=65401),
        lock(0, "a" * 16, "share2", job_id="12", add_grp_id=65401),
        lock(0, "b" * 16, "share3", user="bob", **process),
    )
    node.tick(card(0))
    text = html(node.snapshot([listed(0)]))
    assert ">shared by job 12, pid 99 · alice, bob<" in text
    assert "1 held</title>" in text


def test_a_lock_of_an_earlier_boot_is_as_old_as_the_wall_clock_says() -> None:
    node = Node()
    claimed = EPOCH + node.now - 7200
    node.facts = facts(lock(0, claimed_at=claimed, claimed_boottime=9e8, boot_id="other"))
    node.tick(card(0))
    assert "<time>2h00m</time>" in html(node.snapshot([listed(0)]))


def test_who_waits_and_what_is_reserved_is_listed_and_is_no_markup() -> None:
    node = node_of()
    assert "<h2>" not in html(node.snapshot())
    caller = WaitingCaller(1, 7, 7, 1000, node.now - 300, "alice", "2 GPUs", "<none>")
    one = Reservation("0000:06:00.0", 1001, (1e9, 2e9), "alice", "<thesis>")
    snapshot = replace(node.snapshot(), waiting=(caller,), reservations=(one,))
    text = html(snapshot)
    assert "<h2>Queue</h2><p class=small>alice waits 5m for 2 GPUs: &lt;none&gt;</p>" in text
    assert ": reserved for alice from " in text and "&lt;thesis&gt;" in text
    assert ": reserved for a user from " in html(snapshot, label_user=LabelUser.NONE)
