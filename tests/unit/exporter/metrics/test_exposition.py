# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus reads: against a golden one, the parser of its client, promtool."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.metrics.families import (
    LONGEST_LABEL,
    LabelUser,
    known_labels,
    make_family,
    render_families,
)
from gpulock_exporter.state.snapshot import ExporterHealth, NodeSnapshot
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as text_of

from gpulock.store.verdicts import ALIVE, DEAD, Verdict
from tests.support.exporter_nodes import Node, card, facts, full_card, instance, listed, lock
from tests.support.trees import FakeProc, bus

GOLDEN = Path(__file__).parents[3] / "support/data/exporter/node.prom"
# The names of all series that the exporter owes: changing one breaks somebody's dashboard.
CONTRACT = frozenset(re.findall(r"^# TYPE (\w+)", GOLDEN.read_text(), re.M))
HOSTILE = 'o"h\nno\\ {}=,\x00\x1b\udcff€'
A, B, C, D, E = [letter * 16 for letter in "abcde"]


@pytest.fixture
def scene(tmp_path: Path) -> NodeSnapshot:
    """Return a node with everything on it: GPUs, MIG, a shared one, jobs, a stranger, an XID."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(77)
    proc.add(80, groups=[65480])
    node = Node(proc=str(proc.root), gpus=5, shares=("3:4",))
    node.facts = facts(
        lock(0, A, task_id="3"),
        lock(1, B, user=HOSTILE, comment="SECRET --password=hunter2", spool_dir="/SECRET"),
        lock(2, C, "gi1.ci0", scheduler="slurm", queue="", job_id="77"),
        lock(3, D, "share1", scheduler="slurm", queue="", job_id="80", add_grp_id=65480, places=4),
        lock(3, E, "share2", scheduler="slurm", queue="", job_id="81", user="bob"),
        verdicts={A: Verdict(ALIVE, "SECRET"), B: Verdict(DEAD, ""), C: Verdict(ALIVE, "")},
        counters={"claims_granted": 12.0, "reaped_shepherd": 1.0, "of_a_later_version": 7.0},
        reconciled=995.0,
    )
    node.facts.counters |= {
        "lock_wait_seconds": 0.25,
        "lock_timeouts": 2.0,
        "history_dropped": 500.0,
    }
    use = {"gpm": {"sm_active": 0.5, "sm_occupancy": 0.25, "tensor_active": 0.1, "dram_active": 0}}
    for second in range(3):
        node.tick(
            full_card(0, energy=100.0 + 300 * second, processes={}),
            card(1, processes={77: None}),
            full_card(2, mig=True, busy=None, observed=None, utilization=None, clock_reasons=0),
            instance(2, 1, busy=0.25, observed=1.0, utilization=0.25, processes={}, **use),
            instance(2, 2, memory_utilization=0.5),
            card(3, busy=0.0, processes={80: 1 << 30}),
        )
    cards = node.facts.cards
    cards.of(bus(0)).checks = {"pcie_width": "x8 on PCIe", "memory": ""}
    cards.known = {bus(number) for number in range(4)}
    node.had_xid(0, 79)
    cards.xids["0000:c4:00.0", 20009] = 3, node.now
    why = "xid: XID 79 (GPU has fallen off the bus); health: SECRET"
    node.put_out(
        {
            bus(2): {"reason": "its fan died", "by": "SECRET"},
            bus(3): {"reason": why, "by": "gpulock"},
        }
    )
    node.facts.sources = {"locks", "foreign"}
    node.facts.failures = {"verdicts": "SECRET"}
    found = [listed(0), listed(1), listed(2, "gi1.ci0"), listed(2, "gi2.ci0"), listed(3)]
    own = ExporterHealth("0.1.0", unkillable=1)
    return node.snapshot(found, own)


def written(scene: NodeSnapshot) -> str:
    return render_families(collect_families(scene)).decode()


def test_a_node_reads_as_in_the_golden_text(scene: NodeSnapshot) -> None:
    text = re.sub(r"e\+0(\d\d)", r"e+\1", written(scene))  # of prometheus_client 0.16
    if os.environ.get("GPULOCK_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "SECRET" not in text
    assert not {*re.findall(r'[{,]([a-z_]+)="', text)} & {"job", "instance"}, "Prometheus's own"


def test_the_families_are_the_contracts_and_each_has_a_value_here(scene: NodeSnapshot) -> None:
    families = list(collect_families(scene))
    assert {one.name for family in families for one in family.samples} == CONTRACT
    assert len(families) == len(CONTRACT)


def flat(found: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of a parsed text by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in found
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("how", "user"), [(LabelUser.NAME, "alice"), (LabelUser.UID, "1000"), (LabelUser.NONE, None)]
)
def test_users_are_named_as_the_site_wants(
    how: LabelUser, user: str | None, scene: NodeSnapshot
) -> None:
    text = render_families(collect_families(scene, how)).decode()
    found = [dict(key[1]) for key in flat(text_of(text)) if key[0].endswith("_lock_info")]
    assert found[0].get("user") == user
    assert ("alice" in text) is (how is LabelUser.NAME)


def test_the_value_of_a_label_has_a_length() -> None:
    assert known_labels([("user", '"' * 1000)]) == {"user": '"' * LONGEST_LABEL}


@given(
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_text_and_any_number_are_read_back(text: str, value: float) -> None:
    family = make_family("x", "Something.", [(known_labels([("user", text), ("gpu", "0")]), value)])
    clean = "".join(
        c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text
    )
    body = render_families([family]).decode("utf-8")
    ((name, found), number), *more = flat(text_of(body)).items()
    assert (name, more, number) == ("gpulock_x", [], value)
    assert dict(found).get("user", "") == clean
