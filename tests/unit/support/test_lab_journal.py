# SPDX-License-Identifier: Apache-2.0
"""The labs' judge of what jobs say of their devices sees what a job may complain of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.labs.common.journal import Hold, Journal, complaints, doubles, parse

TEXT = """\
start 1.0 7 node1 0,1
start 2.0 8 node1 1,2
end 3.0 7 node1 0,1
start 4.0 9 node1 0
start 4.0 10 node2 0
end 5.0 8 node1 1,2
end 6.0 9 node1 0
"""


def test_a_device_that_two_jobs_had_at_a_time_is_named() -> None:
    holds = parse(TEXT)
    assert [hold.job for hold in holds] == [7, 8, 9, 10]
    assert doubles(holds) == ["node1 1: jobs 7 and 8"]


def test_each_way_to_harm_a_job_is_told() -> None:
    first = Hold(0, "n", ("a", "b"), 1.0, 2.0)
    well = [first, Hold(1, "n", ("a",), 2.5, 3.0), Hold(2, "n", ("b",), 2.6, 3.0)]
    assert complaints({0: 2, 1: 1, 2: 1}, well) == []
    ill = [first, Hold(1, "n", ("a",), 1.5, 3.0), Hold(2, "n", ("c",), 4.0)]
    assert complaints({0: 2, 1: 2, 2: 1, 3: 1}, ill) == [
        "job 3 never ran",
        "job 1 asked for 2 and saw ('a',)",
        "job 2 was cut short",
        "n a: jobs 0 and 1",
    ]


def test_a_job_writes_what_the_judge_reads(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number, given in enumerate(({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, {})):
        script = ["/bin/bash", "-c", journal.around("read -rt 0.01 x", f"{number} n")]
        subprocess.run(script, env=given, stdin=subprocess.DEVNULL, check=True, timeout=30)
    first, second = journal.holds()
    assert (first.job, first.devices, second.devices) == (0, ("GPU-1", "GPU-2"), ("every",))
    assert first.start < first.last <= second.start < second.last
