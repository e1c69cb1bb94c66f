# SPDX-License-Identifier: Apache-2.0
"""docs/examples/jobstats-comment: what jobstats and reportseff read of a job."""

from __future__ import annotations

import base64
import gzip
import json
import runpy
from typing import Any

import pytest

from tests.support.cli_site import ROOT
from tests.support.trees import bus
from tests.unit.report.test_report import GIB, card, record

SCRIPT = runpy.run_path(str(ROOT / "docs/examples/jobstats-comment"))
UNSEEN: dict[str, Any] = {"observed_seconds": 0, "busy_seconds": None}


def decoded(*claims: dict[str, Any]) -> dict[str, Any]:
    """Decode as reportseff and jobstats do."""
    text: str = SCRIPT["make_comment"]([{"held_seconds": 3600.0, **one} for one in claims])
    assert text.startswith("JS1:")
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text[4:])))
    return found


def test_its_readers_can_read_the_comment() -> None:
    cards = (card(0, use=0.25), card(1, minor=7, **UNSEEN))
    found = decoded(*(record(*cards, node=f"node{number}") for number in range(2)))
    assert (found["total_time"], found["gpus"]) == (3600, 4)
    assert found["nodes"]["node1"] == {
        "gpu_utilization": {"0": 25.0},
        "gpu_total_memory": {"0": 80 * GIB},
        "gpu_used_memory": {"0": 40 * GIB},
    }, "what gpulock does not measure is left out, not 0"


@pytest.mark.parametrize("places", [1, 3])
def test_places_of_one_card_are_one_device(places: int) -> None:
    both = [card(0, minor=3, share=True, places=4) for _ in range(places)]
    found = decoded(record(*both))
    assert found["nodes"]["node1"]["gpu_utilization"] == {"3": 50.0}
    assert found["nodes"]["node1"]["gpu_used_memory"] == {"3": 40 * GIB}
    assert found["gpus"] == 1


def test_instances_of_a_card_keep_apart() -> None:
    both = [card(n, id=f"{bus(0)}.gi{n + 1}.ci0", minor=3) for n in range(2)]
    (node,) = decoded(record(*both))["nodes"].values()
    assert {*node["gpu_utilization"]} == {"3.1", "3.2"}


def test_a_short_job_and_one_that_was_not_seen_have_jobstats_own_words() -> None:
    make = SCRIPT["make_comment"]
    assert make([record(card(0, **UNSEEN), held_seconds=9.0)]) == "JS1:None"
    assert make([record(card(0, 1.5, observed_seconds=0), held_seconds=1.5)]) == "JS1:Short"
    assert make([]) == "JS1:None"
