# SPDX-License-Identifier: Apache-2.0
"""What a real Prometheus makes of the exporter of a simulated node, as jobs come and go."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.alloc import states
from tests.labs.prometheus.lab import Prometheus, free_address, program
from tests.labs.prometheus.scene import Scene, scene
from tests.support.runner import read_table
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
GPUS = 8


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scene]:
    """Give a DGX H200, scraped."""
    with scene("dgx-h200", "IDLE_AFTER=2\n") as found:
        found.server.wait("gpulock_gpu_busy_seconds_total", series=GPUS)
        yield found


@pytest.fixture
def node(scraped: Scene) -> Iterator[Scene]:
    """Give it to a test without jobs; none of that test's is left for the next one."""
    yield scraped
    scraped.clear()
    scraped.server.wait("gpulock:gpu_hold:info", series=0)


def test_promtool_has_no_complaint_about_the_metrics(node: Scene) -> None:
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(
        command, input=node.metrics(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_gpu_goes_from_one_users_job_to_anothers_and_each_is_told_its_own(node: Scene) -> None:
    server = node.server
    first = node.run("-n", "2")
    held = server.wait("gpulock:gpu_hold:energy_joules_total", series=2)
    assert {one.labels["job_id"] for one in held} == {str(first.pid)}
    server.wait("gpulock:job:gpus:count == 2", series=1)
    server.wait(f'gpulock:cluster:gpus:sum{{state="free"}} == {GPUS - 2}', series=1)
    uuid = min(held, key=lambda one: one.labels["gpu"]).labels["uuid"]

    twice = "changes(gpulock:gpu_hold:energy_joules_total[1m]) >= 2"
    server.wait(twice, series=2)
    node.end(first)
    server.wait("gpulock:gpu_hold:info", series=0)
    job = node.submit(77, "daemon")
    (now,) = server.wait("gpulock:gpu_hold:energy_joules_total", series=1)
    assert (now.labels["user"], now.labels["job_id"]) == ("daemon", "77")
    assert now.labels["uuid"] == uuid, "the first GPU went to the next job"
    server.wait('gpulock:gpu_hold:busy_seconds_total{job_id="77"} > 0')
    server.wait(f'{twice} and gpulock:gpu_hold:info{{job_id="77"}}', series=1)
    job.finish()
    node.free()
    server.wait("gpulock:gpu_hold:info", series=0)

    # two holds of one GPU, one after the other: what both got is no more than what it took
    both = f'max_over_time(gpulock:gpu_hold:energy_joules_total{{uuid="{uuid}"}}[5m])'
    since = f'min_over_time(gpulock:gpu_hold:energy_joules_total{{uuid="{uuid}"}}[5m])'
    spent = {one.labels["user"]: one.value for one in server.query(f"{both} - {since}")}
    card = f'gpulock_gpu_energy_joules_total{{uuid="{uuid}"}}'
    whole = server.value(f"max_over_time({card}[5m]) - min_over_time({card}[5m])")
    assert set(spent) == {pwd.getpwuid(os.geteuid()).pw_name, "daemon"}
    assert all(joules > 0 for joules in spent.values())
    assert whole is not None and sum(spent.values()) <= whole
    holders = f'count by (uuid) (gpulock:gpu_hold:info{{uuid="{uuid}"}})'
    assert server.value(f"max_over_time(({holders})[5m:1s])") == 1, "never two at one moment"
    assert server.faults() == []


def test_the_cluster_is_told_as_the_node_tells_itself_and_a_node_that_is_down_is_named(
    node: Scene, tmp_path: Path
) -> None:
    gone = free_address()
    node.script(f"idle={node.stage.simulated.machine.gpus[1].bus}\n")
    node.command("quarantine", "7", "--reason", "Xid 79")
    node.run("-n", "2")

    def own() -> dict[str, str]:
        found = json.loads(node.command("status", "--json"))["totals"]
        counted = {"FREE": states.FREE, "HELD": states.HELD, "IDLE": states.HELD_IDLE}
        return {title: str(found[name]) for title, name in counted.items()}

    def cluster() -> str:
        return node.command("status", "--cluster")

    def agreed() -> str | None:
        text = cluster()
        shown = read_table(text, "NODE").get(node.address, {}) if "NODE" in text else {}
        is_tried = gone in text  # each target has its own moment in the first interval
        return (
            text if is_tried and shown.items() >= own().items() and shown["IDLE"] == "1" else None
        )

    with Prometheus(tmp_path, {"gpulock": [node.address, gone]}, {}) as server:
        with node.stage.config.open("a") as file:
            file.write(f"PROMETHEUS_URL=http://{server.address}\n")
        # twice: the queries of one answer are not of one time
        text = wait_until(lambda: agreed() and agreed(), why=cluster)
    assert read_table(text, "NODE")[node.address]["OTHER"] == "1 quarantined"
    assert f"down  {gone}: Prometheus does not reach the exporter" in text
    assert read_table(text, "MODEL")["H200"]["GPUS"] == "8"
    (user,) = read_table(text, "USER").values()
    assert (user["GPUS"], user["JOBS"], user["NODES"], user["IDLE"]) == ("2", "1", "1", "1")
    node.command("restore", "7")
