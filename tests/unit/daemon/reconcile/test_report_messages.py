# SPDX-License-Identifier: Apache-2.0
"""What the log says of a reconcile: each free with its proof, what lasts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


LIVING = Verdict(ALIVE, "x")


def report(*outcomes: ReapOutcome, gpus: int = 4, **changes: object) -> ReconcileReport:
    made = ReconcileReport([], list(outcomes))
    made.devices = [Device(bus(number), number) for number in range(gpus)]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_each_claim_that_was_freed_is_one_line_with_its_proof() -> None:
    why = "its shepherd is gone, no process carries its group 65400"
    found = report(*[outcome(number, FREED, DEAD, why) for number in (0, 1)])
    assert reconcile_event_messages(found) == [f"freed {bus(0)} {bus(1)} of job 12 (alice): {why}"]


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
    found = report(*[outcome(number, HELD, UNKNOWN, blind) for number in range(4)], blind=blind)
    assert list(lasting_problem_messages(found, 4)) == ["blind"]


EIO = Device(bus(0), 0)
EIO.fault = "its information cannot be read: EIO"
OPEN = f"process 7 has {bus(0)} open"


@pytest.mark.parametrize(
    ("found", "expected", "lines"),
    [
        (report(outcome(0, HELD, ALIVE, "its shepherd 500 runs")), 4, []),
        (
            report(outcome(0, ORPHANS, DEAD, OPEN)),
            4,
            [f"{bus(0)} of job 12 (alice) is not freed: its owner is dead, but {OPEN}"],
        ),
        (report(gpus=3), 4, ["4 GPUs expected (EXPECTED_GPUS=), 3 are there"]),
        (report(gpus=3), 0, []),
        (report(devices=[EIO]), 1, [f"GPU {bus(0)}: {EIO.fault}"]),
        (report(gpus=0, driver="no NVIDIA driver"), 4, ["no NVIDIA driver"]),
        (
            report(outcome(3, HELD, ALIVE, "its shepherd 500 runs"), gpus=3),
            3,
            [f"{bus(3)} is locked, but the driver does not show it"],
        ),
    ],
)
def test_each_thing_that_lasts_is_one_line(
    found: ReconcileReport, expected: int, lines: list[str]
) -> None:
    assert [*lasting_problem_messages(found, expected).values()] == lines


def test_the_summary_counts_devices_of_which_two_places_are_one() -> None:
    held = [outcome(0, HELD, ALIVE, "x"), outcome(1, HELD, UNKNOWN, "y")]
    held += [
        ReapOutcome(Lock(f"{bus(3)}.share{n}", record(), ""), HELD, LIVING, "x") for n in (1, 2)
    ]
    found = report(*held, outcome(2, FREED, DEAD, "z"))
    assert format_daemon_status(found, 8) == "3 of 8 devices held, 1 by an unknown owner"
