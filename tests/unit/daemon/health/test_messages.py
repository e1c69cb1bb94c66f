# SPDX-License-Identifier: Apache-2.0
"""What is told of a device that is out, and what brings it back."""

from __future__ import annotations

import pytest

from gpulock.cli.status.attention import quarantine_end_condition
from gpulock.daemon.health.recovery import (
    ADMIN_RESTORE_ONLY,
    describe_recovery,
    is_policy_note,
    parse_note_causes,
)

AFTER = "a reboot or a reload of the driver, then 3 clean checks"


@pytest.mark.parametrize(
    ("reason", "back"),
    [
        ("xid: XID 79 (off the bus) (gpulock)", AFTER),
        ("memory: 3 MiB stay in use after job 12 (gpulock)", "3 clean checks"),
        ("memory: 3 MiB; ecc: a row (gpulock)", AFTER),
        (
            f"memory: 3 MiB; memory: 3 comebacks in a day, {ADMIN_RESTORE_ONLY} (gpulock)",
            "an administrator",
        ),
        ("memory: I say so (root)", "an administrator"),
        ("xid: no (alice as root)", "an administrator"),
        ("its fan died", "an administrator"),
    ],
)
def test_why_says_what_brings_a_device_back(reason: str, back: str) -> None:
    assert quarantine_end_condition(reason).startswith(back)


def test_a_cause_that_is_not_known_is_nobodys_to_lift() -> None:
    assert parse_note_causes({"reason": "memory: 3 MiB; heat: 99 degrees"}) == ()
    assert not is_policy_note({"by": "gpulock", "reason": "heat: 99 degrees"})
    assert not is_policy_note({"by": "gpulock"})
    assert describe_recovery("") == "an administrator"
