# SPDX-License-Identifier: Apache-2.0
"""What `make gpu-check` compares: it runs where there is a GPU."""

from __future__ import annotations

import pytest

from gpulock.node.devices import Device
from tests.gpu.check import compare_devices, masked
from tests.gpu.compare import ASKED, RULES, Finding, Round, compare_values


def test_a_device_that_nvml_knows_otherwise_is_named() -> None:
    """A minor that differs is a job on another's card."""
    ours = Device("0000:1b:00.0", 0)
    ours.minor, ours.uuid = 1, "GPU-1"
    theirs = {"bus_id": "00000000:1B:00.0", "minor": 1, "uuid": "GPU-1"}
    assert compare_devices([ours], [{"identity": theirs}]) == []
    other = {"identity": {**theirs, "minor": 2}}
    assert compare_devices([ours], [other]) == ["GPU 0: minor is 1 in /proc, 2 in NVML"]
    assert compare_devices([ours], []) == ["/proc has 1 GPUs, NVML 0"]


@pytest.mark.parametrize(
    ("metric", "ours", "said", "finding"),
    [
        ("temperature_celsius", 41, "43", Finding.AGREED),
        ("temperature_celsius", 41, "44", Finding.DIFFERED),
        ("power_watts", None, "77.1", Finding.DIFFERED),
        ("power_watts", 77.1, "[N/A]", Finding.DIFFERED),
        ("power_watts", None, "[N/A]", Finding.ABSENT),
        ("ecc_errors_total l1 corrected", None, "0", Finding.ABSENT),
        ("ecc_errors_total l1 corrected", None, "1", Finding.DIFFERED),
        ("clock_event_active sw_power_cap", 1, "0x4", Finding.AGREED),
        ("clock_event_active sw_power_cap", 1, "0x8", Finding.DIFFERED),
        ("energy_joules_total", 3000, "300.00", Finding.AGREED),
        ("energy_joules_total", 1350, "300.00", Finding.DIFFERED),
        ("energy_joules_total", None, "[N/A]", Finding.ABSENT),
    ],
)
def test_what_both_say_in_ten_seconds_is_judged(
    metric: str, ours: float | None, said: str, finding: Finding
) -> None:
    rule = next(rule for rule in RULES if rule.metric == metric)
    rows = {"GPU-1": dict.fromkeys(ASKED, "[N/A]") | dict.fromkeys(rule.fields, said)}
    rounds: list[Round] = []
    for second in (0.0, 10.0):
        value = 0.0 if rule.grows and not second and ours is not None else ours
        cards = {"GPU-1": {} if value is None else {metric: value}}
        rounds.append(Round(second, cards, rows, cards))
    found = compare_values(rounds, ASKED)
    assert [line.finding for line in found if line.metric == metric] == [finding]


def test_a_record_names_neither_machine_nor_instance() -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    text = masked(f"GPU-b and {mig} on gpu07, not on gpu077", ["GPU-a", "GPU-b"], "gpu07")
    assert text == (
        "GPU-00000000-0000-0000-0000-000000000001 and MIG-00000000-0000-0000-0000-000000000002 "
        "on node, not on gpu077"
    )
