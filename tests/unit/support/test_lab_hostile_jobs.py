# SPDX-License-Identifier: Apache-2.0
"""The judge of the labs' random hostile jobs sees what an honest job may complain of."""

from __future__ import annotations

from tests.labs.common.hostile_jobs import (
    Run,
    complaints,
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
