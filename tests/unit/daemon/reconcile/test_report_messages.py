# SPDX-License-Identifier: Apache-2.0
"""What the log says of a reconcile: each free with its proof, what lasts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulock.alloc import reaper
from gpulock.alloc.reaper import FREED, HELD, ORPHANS, ReapOutcome
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.report_messages import (
    format_daemon_status,
    lasting_problem_messages,
    reconcile_event_messages,
)
from gpulock.node.devices import Device
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.trees import bus, record

if TYPE_CHECKING:
    from gpulock.store.verdicts import State


def outcome(
    number: int, act: reaper.ReapAct, state: State, why: str, owner: Owner | None = None
) -> ReapOutcome:
    lock = Lock(bus(number), owner or record(), "")
    return ReapOutcome(lock, act, Verdict(state, why), why)


def report(*outcomes: ReapOutcome, gpus: int = 4) -> ReconcileReport:
    made = ReconcileReport([], list(outcomes))
    made.devices = [Device(bus(number), number) for number in range(gpus)]
    return made


def test_each_claim_that_was_freed_is_one_line_with_its_proof() -> None:
    why = "its shepherd is gone, no process carries its group 65400"
    found = report(*[outcome(number, FREED, DEAD, why) for number in (0, 1)])
    assert reconcile_event_messages(found) == [f"freed {bus(0)} {bus(1)} of job 12 (alice): {why}"]


def test_what_was_put_back_is_told() -> None:
    found = report()
    found.restored = [record(devices=(bus(0), bus(2)))]
    (line,) = reconcile_event_messages(found)
    assert line.startswith(f"restored {bus(0)} {bus(2)} of job 12 (alice)")


def lasting_keys(why: str, token: str = "a1") -> set[str]:
    """Return the keys of what is told of a lock whose owner is not known."""
    found = report(outcome(0, HELD, UNKNOWN, why, record(token=token)))
    return set(lasting_problem_messages(found, 4))


def test_a_lock_of_an_unknown_owner_has_one_key_whatever_the_reason_and_a_new_owner_one() -> None:
    (first,) = lasting_keys("process 7 cannot be seen")
    assert lasting_keys("process 8 cannot be seen") == {first}
    assert lasting_keys("process 8 cannot be seen", "b2") != {first}


def test_blindness_is_told_once_and_not_for_each_lock() -> None:
    blind = "processes came and went faster than they could be read"
    found = report(*[outcome(number, HELD, UNKNOWN, blind) for number in range(4)])
    found.blind = blind
    assert list(lasting_problem_messages(found, 4)) == ["blind"]


def test_orphans_name_the_process() -> None:
    found = lasting_problem_messages(
        report(outcome(0, ORPHANS, DEAD, f"process 7 has {bus(0)} open")), 4
    )
    (line,) = found.values()
    assert "not freed" in line and "process 7" in line


def test_a_missing_card_is_told() -> None:
    (line,) = lasting_problem_messages(report(gpus=3), 4).values()
    assert line == "4 GPUs expected (EXPECTED_GPUS=), 3 are there"
    assert lasting_problem_messages(report(gpus=3), 0) == {}


def test_without_a_driver_the_cards_are_not_missing_one_by_one() -> None:
    found = report(gpus=0)
    found.driver = "no NVIDIA driver: /proc/driver/nvidia/gpus is missing"
    assert list(lasting_problem_messages(found, 4)) == ["driver"]


def test_a_card_that_cannot_be_read_is_told() -> None:
    found = report()
    found.devices[2].fault = "its information cannot be read: EIO"
    assert lasting_problem_messages(found, 4) == {
        f"fault {bus(2)}": f"GPU {bus(2)}: {found.devices[2].fault}"
    }


def test_a_card_that_is_locked_and_gone_is_told() -> None:
    found = report(outcome(3, HELD, ALIVE, "its shepherd 500 runs"), gpus=3)
    assert lasting_problem_messages(found, 3) == {
        f"gone {bus(3)}": f"{bus(3)} is locked, but the driver does not show it"
    }


def test_the_summary_counts() -> None:
    held = [outcome(0, HELD, ALIVE, "x"), outcome(1, HELD, UNKNOWN, "y")]
    found = report(*held, outcome(2, FREED, DEAD, "z"))
    assert format_daemon_status(found, 8) == "2 of 8 devices held, 1 by an unknown owner"
