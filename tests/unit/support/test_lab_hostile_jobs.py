# SPDX-License-Identifier: Apache-2.0
"""The judge of the labs' random hostile jobs sees what an honest job may complain of."""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random

from tests.labs.common.hostile_jobs import (
    ZOO,
    Run,
    complaints,
    honest_script,
    hostile_job,
    parse_journal,
)


def test_honest_jobs_that_all_had_their_own_devices_do_not_complain() -> None:
    runs = [Run(0, ("a", "b"), 1.0, 2.0), Run(1, ("a",), 2.5, 3.0), Run(2, ("b",), 2.6, 3.0)]

    assert complaints({0: 2, 1: 1, 2: 1}, runs) == []


def test_each_way_to_harm_an_honest_job_is_told() -> None:
    runs = [Run(0, ("a", "b"), 1.0, 2.0), Run(1, ("a",), 1.5, 3.0), Run(2, ("c",), 4.0)]

    assert complaints({0: 2, 1: 2, 2: 1, 3: 1}, runs) == [
        "job 3 never ran",
        "job 1 asked for 2 and saw ('a',)",
        "job 2 was cut short",
        "jobs 0 and 1 had ['a'] at the same time",
    ]


def test_an_honest_job_writes_what_the_judge_reads(tmp_path: Path) -> None:
    for number, mask in enumerate(("GPU-1,GPU-2", "")):
        script = honest_script(number, tmp_path / "journal", 0.01)
        env = {"CUDA_VISIBLE_DEVICES": mask}
        subprocess.run(["/bin/bash", "-c", script], env=env, check=True, timeout=30)

    first, second = parse_journal((tmp_path / "journal").read_text())
    assert (first.number, first.devices, second.devices) == (0, ("GPU-1", "GPU-2"), ())
    assert first.start < first.end <= second.start < second.end


def test_every_script_of_the_zoo_is_one_that_bash_understands() -> None:
    rng = Random(1)
    jobs = {j.name.split()[0]: j for j in [hostile_job(rng, [], "/x", {}) for _ in range(500)]}

    assert len({j.script for j in jobs.values()}) == len({name.split()[0] for name in ZOO})
    for job in jobs.values():
        subprocess.run(["/bin/bash", "-n"], input=job.script, text=True, check=True, timeout=30)
