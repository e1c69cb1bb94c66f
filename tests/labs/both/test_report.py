# SPDX-License-Identifier: Apache-2.0
"""The report of a job, against what its GPUs were made to do."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest

from gpulock.node.sample import FINISHED, Sample
from tests.labs.both.site import Site
from tests.labs.common.exporter_node import PLACE, exporter
from tests.nvml.double import Double
from tests.nvml.node import ENERGY
from tests.support.history_site import read_history
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SECONDS: Final = 12
WATTS, GIB = 200, 1 << 30


def at_work(nvml: Double) -> None:
    """Let GPU 0 work for 75 % of the time from now on and use 3 GiB; GPU 1 does nothing."""
    energy = f"{ENERGY}+{WATTS * 1000}/s@{time.time_ns() // 1000}"
    nvml.update({"gpu0.memory.used": 3 * GIB, "gpu0.energy": energy})
    nvml.load(0, 75)


def looks(found: Sample) -> bool:
    """Return whether the exporter has seen GPU 0 at work."""
    return any((seen.busy or 0) > 0 for seen in found.devices.values())


def the_claim(site: Site, job: int) -> dict[str, Any]:
    """Return the only claim that a report tells of."""
    (found,) = json.loads(site.command("report", str(job), "--json"))["claims"]
    claim: dict[str, Any] = found
    return claim


def test_a_jobs_report_has_the_numbers_that_its_gpus_were_made_to_have(site: Site) -> None:
    folder = site.gpus.cluster.lab / "report" / site.node
    folder.mkdir(parents=True)
    site.configure()
    with exporter(site.gpus, site.node, folder, looks, at_work) as seen:
        job = site.submit(2, f"sleep {SECONDS}\n")
        site.wait_over(job)
        told = (
            site.gpus.cluster.path_in(site.node, PLACE) / FINISHED / the_claim(site, job)["token"]
        )
        wait_until(told.exists, why="the exporter to tell how the claim ended")
        printed = site.command("report", str(job))
        (row,) = [line for line in printed.splitlines() if line.split()[:1] == ["0"]][:1]
        assert abs(int(row.split()[2]) - 75) <= 8, row
        assert "GPU 1" not in printed, "twelve seconds are too short for advice"

        before = the_claim(site, job)
        site.command("reap")
        assert len(read_history(site.state_dir)) == 1
        after = the_claim(site, job)
        assert before["devices"] == after["devices"]
        first, second = after["devices"]
        held = first["held_seconds"]
        assert held >= SECONDS - 1
        assert held == pytest.approx(after["released_at"] - after["claimed_at"], abs=1)
        assert first["observed_seconds"] >= 0.8 * held
        assert first["busy_seconds"] / first["observed_seconds"] == pytest.approx(0.75, abs=0.06)
        assert (second["busy_seconds"], second["last_busy"]) == (0.0, None)
        assert first["memory_peak_bytes"] == pytest.approx(3 * GIB, rel=0.01)
        assert first["energy_joules"] == pytest.approx(WATTS * first["observed_seconds"], rel=0.15)
        assert (after["how"], after["user"], after["node"]) == ("epilog", site.alice, site.node)
        use = after["shapes"][first["id"]]["use"]
        assert sum(700 <= (one or 0) <= 800 for one in use) >= len(use) / 2
        seen.nvml.reset()
    (sums,) = json.loads(site.command("history", "--by", "user", "--json"))["sums"]
    assert (sums["user"], sums["claims"]) == (site.alice, 1)
    assert sums["gpu_seconds"] == pytest.approx(2 * held, abs=1)
