# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboards and every name of dcgm-exporter gives series of a real node."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Iterator

import pytest

from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.simulate.presets import PRESETS
from gpulock.store.quarantine import POLICY, QUARANTINE, write_device_note
from tests.labs.prometheus.lab import RULES, SHORTER
from tests.labs.prometheus.scene import Scene, scene
from tests.support.dashboards import board_queries, shipped_boards
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SGE_JOB = 78
FANLESS = "gpulock_gpu_fan_ratio"  # of cards with a fan, which no H200 has
EVERYTHING = ("$scheduler", "$task_id", "$cluster", "$user")
# Grafana's 12239, "NVIDIA DCGM Exporter Dashboard", in its revisions of 2020 to 2026
ITS_CHOICES = [
    ("DCGM_FI_DEV_GPU_TEMP", "instance"),
    ("DCGM_FI_DEV_GPU_TEMP", "gpu"),
    ("DCGM_FI_DEV_FB_FREE", "Hostname"),
    ("DCGM_FI_DEV_FB_FREE", "gpu"),
]


@pytest.fixture(scope="module")
def node() -> Iterator[Scene]:
    """Give a node of H200s, two split and one shared, with jobs that have been at work and idle."""
    # no preset has cards that are split and tell how busy each part is
    machine, card = PRESETS["a100-mig"], PRESETS["dgx-h200"].card
    split = dataclasses.replace(machine, name="h200-mig", card=card, shares="7:4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpulock.simulate.node.PRESETS", {"h200-mig": split})
        with scene("h200-mig") as found:
            yield prepared(found)


def prepared(found: Scene) -> Scene:
    """Have everything on the node that a panel can show."""
    whole = [one for one in found.devices() if ".gi" not in one.id]
    parts = [one for one in found.devices() if ".gi" in one.id]
    found.server.wait('gpulock_gpu_info{parent_uuid=""}', series=8)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            held = [device.uuid or device.id for device in (*whole[:2], *parts[:2])]
            found.run("--devices", ",".join(held))
            found.run("--share", "-n", "2")
            locks = found.stage.simulated.lock_dir / "locks"
            # the next job takes one of these cards if it may
            wait_until(lambda: len([*locks.glob("*/owner")]) == 6, why="6 devices to be held")
            found.submit(SGE_JOB, "daemon", task=2)
            found.reap()
            script = {
                "idle": [whole[0].id, parts[0].id],
                "foreign": [f"{whole[1].id}:{stranger.pid}"],
            }
            found.script("".join(f"{name}={','.join(each)}\n" for name, each in script.items()))
            note_faults(found.stage.node(), whole[1].bus, whole[2].bus)
            found.server.wait("gpulock_gpu_quarantine_info")
            found.server.wait('gpulock:gpu_hold:idle_seconds{gpu!~".*:.*"} >= 6')
            found.server.wait('gpulock:gpu_hold:idle_seconds{gpu=~".*:.*"} >= 6')
            found.server.wait("gpulock:share_hold:ratio")
            found.server.wait("gpulock_gpu_foreign_processes > 0")
            found.server.wait("gpulock_gpu_xid_errors_total")
            found.server.wait('ALERTS{alertname=~"Gpulock.*",alertstate="firing"}')
        finally:
            stranger.kill()  # whose end is waited for
    return found


def note_faults(node: Node, xid: str, narrow: str) -> None:
    """Note an XID of a card, and that another is out of service for a check, as gpulockd does."""
    state, why = node.settings.state_dir, "x8 on PCIe, and its neighbours have x16"
    cards = read_cards(state, node.boot_id)
    cards.xids[xid, 31] = 1, clock_boottime()
    cards.of(narrow).checks = {"pcie_width": why}
    assert save_cards(state, cards)
    write_device_note(state, QUARANTINE, narrow, POLICY, f"health: {why}")


def chosen(expression: str, found: Scene, job_id: str) -> str:
    """Return an expression as Grafana sends it, with windows that a test can wait for."""
    for name in EVERYTHING:
        expression = expression.replace(name, ".*")
    values = {
        "$instance": found.address,
        "$gpu": "0|1|2|3|4|5|6|7",
        "$job_id": job_id,
        "$__rate_interval": "10s",
        "$__range": "1m",
    }
    for name, value in values.items():
        expression = expression.replace(name, value)
    for pattern, shorter in SHORTER:
        expression = pattern.sub(shorter, expression)
    return expression


def test_every_query_of_every_dashboard_gives_series(node: Scene) -> None:
    whole, sharing = (str(job.pid) for job in node.started)
    asked = [
        (name, chosen(one, node, sharing if "share_" in one and "gpu_hold" not in one else whole))
        for name, board in shipped_boards().items()
        for one in board_queries(board)
    ]
    assert len(asked) > 70
    assert [one for one in asked if "$" in one[1]] == []
    missing = [one for _, one in asked if FANLESS in one]
    for _, one in asked:
        if one not in missing:
            node.server.wait(one)
    assert [node.server.query(one) for one in missing] == [[]]


def test_the_choices_of_the_dashboards_are_not_empty(node: Scene) -> None:
    asked: list[str] = []
    for board in shipped_boards().values():
        for one in board["templating"]["list"]:
            if one["type"] == "query" and one["name"] != "cluster":  # a label that a site adds
                asked.append(one["query"])
    for query in asked:
        series, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        found = node.server.wait(f"count by ({label}) ({chosen(series, node, str(SGE_JOB))})")
        assert [one for one in found if one.labels], query
    assert len(asked) == 5


@pytest.mark.parametrize("release", ["4.8", "4.9"])
def test_every_name_of_dcgm_exporter_gives_series(node: Scene, release: str) -> None:
    names = re.findall(r"- record: (DCGM_\w+)", (RULES / f"gpulock-dcgm-{release}.yml").read_text())
    assert len(names) > 20
    for name in names:
        assert node.server.wait(name)


def test_dashboard_12239_has_its_choices_and_each_gpu_once(node: Scene) -> None:
    for series, label in ITS_CHOICES:
        found = node.server.wait(f"count by ({label}) ({series})")
        assert found and all(one.labels[label] for one in found), label
    (count,) = node.server.wait("count(DCGM_FI_DEV_GPU_TEMP) >= 8")
    assert count.value == 8
    twice = "count by (gpu, GPU_I_ID) (DCGM_FI_DEV_FB_USED) > 1"
    assert node.server.query(twice) == []
    parts = node.server.wait('count by (gpu) (DCGM_FI_DEV_FB_USED{GPU_I_ID!=""})')
    assert {one.labels["gpu"] for one in parts} == {"0", "1"}, "the cards that are split"
    assert node.server.faults() == []
