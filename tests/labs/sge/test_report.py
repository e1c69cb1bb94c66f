# SPDX-License-Identifier: Apache-2.0
"""What a job of a real Grid Engine is told at its end, against what its GPUs were made to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.labs.common.report_node import GIB, WATTS, observed
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import command, on, said

pytestmark = pytest.mark.lab
NODE = NODES[0]
SECONDS = 12


def test_a_jobs_report_has_the_numbers_that_its_gpus_were_made_to_have(gpus: Gpulock) -> None:
    sge = gpus.sge

    def configure(**keys: str) -> None:
        gpus.configure(NODE, **keys)

    folder = sge.lab / "report" / NODE
    with observed(gpus, NODE, folder, configure) as nvml:
        job = sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=f"sleep {SECONDS}")
        sge.wait_settled(job)
        printed = said(gpus, job)
        assert f"Job {job} of glalice" in printed, printed
        (row,) = [line for line in printed.splitlines() if line.split()[:1] == ["0"]][:1]
        assert abs(int(row.split()[2]) - 75) <= 8, row
        assert "GPU 1" not in printed, "twelve seconds are too short for advice"

        before = the_claim(gpus, str(job))
        command(gpus, NODE, "reap")
        assert (
            sge.path_in(NODE, "/var/lib/gpulock/history/history.jsonl").read_text().count("\n") == 1
        )
        after = the_claim(gpus, str(job))
        assert before["devices"] == after["devices"]
        first, second = after["devices"]
        held = first["held_seconds"]
        assert held >= SECONDS - 1
        assert held == pytest.approx(after["released_at"] - after["claimed_at"], abs=1)
        assert first["observed_seconds"] >= 0.8 * held
        assert first["utilization"] == pytest.approx(0.75, abs=0.06)
        assert (second["utilization"], second["last_busy"]) == (0.0, None)
        assert first["memory_peak_bytes"] == pytest.approx(3 * GIB, rel=0.01)
        assert first["energy_joules"] == pytest.approx(WATTS * first["observed_seconds"], rel=0.15)
        assert after["how"] == "epilog"
        use = after["shapes"][first["id"]]["use"]
        assert sum(700 <= (one or 0) <= 800 for one in use) >= len(use) / 2
        nvml.reset()
    (filed,) = (folder.parent / "shared").glob(f"{job}.*.json")
    assert filed.stat().st_uid == sge.users["glalice"].uid
    assert json.loads(filed.read_text())["token"] == after["token"]
    hours = command(gpus, NODE, "history", "--by", "user", "--csv").splitlines()[1].split(",")
    assert hours[:2] == ["glalice", "1"]
    assert float(hours[2]) == pytest.approx(2 * held, abs=1)


def the_claim(gpus: Gpulock, job: str) -> dict[str, Any]:
    """Return the only claim that a report tells of."""
    every: list[dict[str, Any]] = json.loads(command(gpus, NODE, "report", job, "--json"))["claims"]
    (found,) = every
    return found
