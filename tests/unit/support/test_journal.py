# SPDX-License-Identifier: Apache-2.0
"""The labs' judge of what jobs say of their devices sees a device that two had at a time."""

from __future__ import annotations

from tests.labs.slurm.journal import doubles, parse

JOURNAL = """\
start 1.0 7 node1 0,1
start 2.0 8 node1 1,2
end 3.0 7 node1 0,1
start 4.0 9 node1 0
start 4.0 10 node2 0
end 5.0 8 node1 1,2
end 6.0 9 node1 0
"""


def test_a_device_that_two_jobs_had_at_a_time_is_named() -> None:
    holds = parse(JOURNAL)
    assert [hold.job for hold in holds] == [7, 8, 9, 10]
    assert doubles(holds) == ["node1 1: jobs 7 and 8"]
