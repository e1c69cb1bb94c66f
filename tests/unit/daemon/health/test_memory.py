# SPDX-License-Identifier: Apache-2.0
"""A device whose memory is not given back goes to the next job, and is then found by gpulockd."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.release import release_locks
from gpulock.daemon.health.card_checks import MIB
from tests.support.health_site import SHEPHERD, Ward
from tests.support.trees import bus, judge_of, soon


def end_job(ward: Ward) -> list[str]:
    """Let the job that holds GPUs end, and its epilog release them; return what is free."""
    ward.proc.remove(SHEPHERD)
    node = ward.node()
    return release_locks(node, lambda _: True, judge_of(node), soon(), "epilog").freed


@pytest.mark.parametrize("leftovers", ["off", "report", "kill"])
def test_a_release_does_not_wait_for_the_memory_and_gpulockd_puts_the_device_out(
    tmp_path: Path, leftovers: str
) -> None:
    ward = Ward(tmp_path, LEFTOVER_PROCESSES=leftovers)
    ward.round()
    ward.hold(0)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round()
    assert end_job(ward) == [bus(0)]
    assert (ward.locks(), ward.out()) == ([], [])
    ward.round(2)
    assert ward.reason(0) == "memory: 300 MiB are in use without a process"
    ward.tell(0)
    ward.round(3)
    assert ward.out() == []


def test_without_that_policy_claims_take_the_device_last(tmp_path: Path) -> None:
    ward = Ward(tmp_path, QUARANTINE_ON="xid missing")
    ward.round()
    ward.hold(0)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round()
    end_job(ward)
    ward.round(2)
    assert ward.suspects() == {bus(0): "300 MiB are in use without a process"}
    assert ward.out() == []
