# SPDX-License-Identifier: Apache-2.0
"""A device whose memory is not given back goes to the next job, and is then found by gpulockd."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.release import release_locks
from gpulock.daemon.health.checker import CardChecker
from gpulock.daemon.health.memory import CLEAN, DIRTY, MIB, NOT_KNOWN, judge_memory
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.node import sample
from gpulock.store.quarantine import read_suspect_cards
from tests.support.health_site import Ward
from tests.support.trees import BOOT, bus, judge_of, soon


def seen(**values: object) -> sample.DeviceSample:
    return sample.DeviceSample({"looked": 100.0, "memory_used": 0, "processes": 0, **values}, {})


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({}, CLEAN),
        ({"memory_used": 256 * MIB}, CLEAN),
        ({"memory_used": 256 * MIB + 1}, DIRTY),
        ({"memory_used": 80 << 30, "processes": None}, NOT_KNOWN),
        ({"memory_used": 80 << 30, "processes": 1}, NOT_KNOWN),
        ({"memory_used": 80 << 30, "listed": 91.0}, DIRTY),
        ({"memory_used": 80 << 30, "listed": 90.0}, NOT_KNOWN),
        ({"memory_used": 0, "processes": 1, "listed": 60.0}, CLEAN),
        ({"memory_used": 80 << 30, "coherent": 0}, DIRTY),
        ({"memory_used": 80 << 30, "coherent": 1}, CLEAN),
        ({"memory_used": 80 << 30, "coherent": 1, "looked": 90.0}, NOT_KNOWN),
        ({"memory_used": None}, NOT_KNOWN),
        ({"looked": None}, NOT_KNOWN),
        ({"looked": 90.0}, NOT_KNOWN),
        ({"looked": 90.0, "memory_used": 80 << 30}, NOT_KNOWN),
    ],
)
def test_only_a_sample_from_after_the_device_was_free_counts(
    values: dict[str, object], state: str
) -> None:
    assert judge_memory(seen(**values), 90.0) == state


def test_the_memory_of_a_device_that_no_sample_names_is_not_known() -> None:
    assert judge_memory(None) == NOT_KNOWN


def end_job(ward: Ward) -> list[str]:
    """Let the job that holds GPUs end, and its epilog release them; return what is free."""
    ward.proc.remove(500)
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
    assert ward.reason(0) == "memory: 300 MiB stay in use without a process"
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
    checker = CardChecker(ward.journal, lambda: ward.now)
    for _ in range(2):
        ward.round()
        node = ward.node()
        checker.run(node, reconcile_locks(node, judge_of(node), soon()), ward.now)
    ward.round()
    why = "300 MiB are in use without a process"
    assert read_suspect_cards(str(ward.lock), BOOT) == {bus(0): why}
    assert ward.out() == []
