# SPDX-License-Identifier: Apache-2.0
"""What `make gpu-check` compares: it runs where there is a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.check import masked
from tests.gpu.compare import INFO, RULES, compare_dump, compare_values, read_scrape

CARD = {"bus_id": "0000:1b:00.0", "minor": 1, "uuid": "GPU-1"}
ROW = dict(zip(INFO.values(), ("H", "00000000:1B:00.0", "590", "0", "Enabled", "[N/A]")))
INFO_LINE = (
    'gpulock_gpu_info{uuid="GPU-1",name="H",pci_bus_id="0000:1b:00.0",driver_version="590",'
    'gpu="0",mig_mode="1"} 1'
)


def test_a_device_that_nvml_knows_otherwise_is_named() -> None:
    """A minor that differs is a job on another's card."""
    one = {"metrics": [INFO_LINE], "nvidia-smi": {"GPU-1": ROW}}
    card = {**CARD, "bus_id": "00000000:1B:00.0"}
    dump = {"rounds": [one], "proc": [CARD], "nvml": {"cards": [{"identity": card}]}}
    assert compare_dump(dump) == []
    card["minor"], ROW["name"] = 2, "X"
    assert compare_dump(dump) == [
        "GPU 0: minor is 1 in /proc, 2 in NVML",
        "GPU-1  info name: 'H', nvidia-smi 'X'",
    ]
    dump["nvml"] = {"cards": []}
    assert compare_dump(dump)[0] == "/proc has 1 GPUs, NVML 0"


def test_a_label_of_a_metric_is_part_of_its_name() -> None:
    text = (
        'gpulock_gpu_ecc_errors_total{uuid="A",location="l1",type="corrected"} 2\n'
        'gpulock_gpu_recovery_action{uuid="A",action="node_reboot"} 1\n'
    )
    values = read_scrape(text)[0]["A"]
    assert values["ecc_errors_total l1 corrected"] == values["recovery_action"] == 2


@pytest.mark.parametrize(
    ("metric", "ours", "said", "agreed"),
    [
        ("temperature_celsius", 41, "43", True),
        ("temperature_celsius", 41, "44", False),
        ("power_watts", None, "77.1", False),
        ("power_watts", 77.1, "[N/A]", False),
        ("power_watts", None, "[N/A]", True),
        ("power_watts", 77.1, "unheard of", False),
        ("ecc_errors_total l1 corrected", None, "0", True),
        ("ecc_errors_total l1 corrected", None, "1", False),
        ("clock_event_active sw_power_cap", 1, "0x4", True),
        ("clock_event_active sw_power_cap", 1, "0x8", False),
        ("recovery_action", 2, "Reboot", True),
        ("energy_joules_total", 3000, "300.00", True),
        ("energy_joules_total", 1350, "300.00", False),
        ("energy_joules_total", None, "[N/A]", True),
    ],
)
def test_what_both_say_in_ten_seconds_is_judged(
    metric: str, ours: float | None, said: str, agreed: bool
) -> None:
    rule = next(rule for rule in RULES if rule.metric == metric)
    first = {} if ours is None else {metric: 0.0 if rule.rate else ours}
    last = {} if ours is None else {metric: ours}
    found = compare_values([first, last], [dict.fromkeys(rule.fields, said)] * 2, 10.0)
    assert (f"{metric}:" not in str(found)) is agreed


def test_a_record_names_neither_machine_nor_instance() -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    text = masked(f"GPU-b and {mig} on gpu07, not on gpu077", ["GPU-a", "GPU-b"], "gpu07")
    assert text == (
        "GPU-00000000-0000-0000-0000-000000000001 and MIG-00000000-0000-0000-0000-000000000002 "
        "on node, not on gpu077"
    )
