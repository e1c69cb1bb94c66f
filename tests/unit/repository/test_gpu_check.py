# SPDX-License-Identifier: Apache-2.0
"""How `make gpu-check` reads both sides and judges them: no GPU, no NVML, no process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from gpulock_exporter.metrics.devices import SEVERAL, SINGLE

from tests.gpu import instances
from tests.gpu.check_devices import Device, differences, normal_bus_id, parse_information
from tests.gpu.compare import Finding, Line, Round, integral, judge, kernel_bus
from tests.gpu.record import About, masked, page, stem
from tests.gpu.rules import COUNTERS, EVERY, OURS_ALONE, PROCESSES, RULES
from tests.gpu.scraped import Card, parse_cards, parse_labels
from tests.gpu.smi import Answer, SmiError, is_absent, number, parse_names, parse_pids, parse_rows

UUID = "GPU-11111111-2222-3333-4444-555555555555"
HELP = """List of valid properties to query for the switch "--query-gpu":

"timestamp"
The timestamp of when the query was made in format "YYYY/MM/DD HH:MM:SS.msec".

"clocks.current.sm" or "clocks.sm"
Current frequency of SM (Streaming Multiprocessor) clock.
"""
SCRAPE = f"""# HELP gpulock_gpu_info What a GPU is; always 1.
gpulock_gpu_info{{gpu="0",uuid="{UUID}",name="NVIDIA H200",pci_bus_id="0000:1b:00.0"}} 1
gpulock_gpu_temperature_celsius{{gpu="0",uuid="{UUID}"}} 41.0
gpulock_gpu_ecc_errors_total{{gpu="0",uuid="{UUID}",type="corrected",location="dram"}} 3
gpulock_gpu_locked{{gpu="7",uuid="GPU-gone"}} 0
gpulock_nvml_up 1
"""


def rounds(
    ours: Mapping[str, float], told: Mapping[str, str], count: int = 4, **after: float
) -> list[Round]:
    """Return rounds a second apart that are all alike; `after` is what differs at the last."""
    found: list[Round] = []
    for place in range(count):
        cards = {UUID: Card({"name": "NVIDIA H200"}, ours)}
        answer = Answer({UUID: {field: "[N/A]" for field in EVERY} | dict(told)}, {UUID: ()})
        found.append(Round(float(place), "idle", True, cards, answer, cards))
    last = {UUID: Card({"name": "NVIDIA H200"}, {**ours, **after})}
    return [*found[:-1], found[-1]._replace(after=last)]


def finding(lines: list[Line], metric: str) -> Finding:
    """Return what was found of a metric."""
    return next(line.finding for line in lines if line.metric == metric)


def judged(metric: str, ours: float | None, field: str, told: str) -> Finding:
    """Return what four equal rounds come to."""
    known = {metric: ours} if ours is not None else {}
    return finding(judge(rounds(known, {field: told}), EVERY), metric)


def families() -> set[str]:
    """Return every family of a card, without prefix and further labels."""
    return {"lock_info", *(name for name, _, _ in (*SINGLE, *SEVERAL))}


def test_every_family_of_a_card_is_compared_or_said_not_to_be() -> None:
    """A new metric must be given a place here."""
    metrics = [rule.metric for rule in (*RULES, PROCESSES)] + [rule.metric for rule in COUNTERS]
    compared = {metric.split()[0] for metric in metrics}
    assert compared | set(OURS_ALONE) == families()
    assert not compared & set(OURS_ALONE)


def test_the_fields_of_nvidia_smi_are_found_by_both_their_names() -> None:
    """It explains them in the same text, in quotes too."""
    assert parse_names(HELP) == {"timestamp", "clocks.current.sm", "clocks.sm"}


def test_rows_are_found_by_uuid_and_a_row_of_another_length_is_refused() -> None:
    """A name with a comma would move everything behind it."""
    assert parse_rows(f"{UUID}, 41\n", ["uuid", "temperature.gpu"])[UUID]["temperature.gpu"] == "41"
    with pytest.raises(SmiError, match="3 values for 2 fields"):
        parse_rows(f"{UUID}, A, B\n", ["uuid", "name"])


def test_each_process_on_a_card_counts_once() -> None:
    """One may have two contexts there; other cards are not asked for."""
    assert parse_pids(f"{UUID}, 12\nGPU-other, 13\n{UUID}, 12\n{UUID}, 9\n", UUID) == (9, 12)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("temperature.gpu", "41", 41.0),
        ("clocks_event_reasons.active", "0x0000000000000004", 4.0),
        ("remapped_rows.pending", "No", 0.0),
        ("remapped_rows.failure", "Yes", 1.0),
        ("gpu_recovery_action", "None", 0.0),
        ("gpu_recovery_action", "Drain and Reset", 4.0),
        ("gpu_recovery_action", "Pray", None),
        ("temperature.gpu", "warm", None),
    ],
)
def test_what_nvidia_smi_writes_becomes_a_number(
    field: str, text: str, value: float | None
) -> None:
    """Its words are those of `nvidia-smi -q` on an H200."""
    assert number(field, text) == value


@pytest.mark.parametrize(
    "text", ["[N/A]", "[Not Supported]", "[Requested functionality has been deprecated]", "N/A"]
)
def test_what_a_card_does_not_have_is_said_in_brackets(text: str) -> None:
    """None of it is a value."""
    assert is_absent(text)


def test_a_scrape_is_read_by_card_and_labels() -> None:
    """What is of no card that NVML tells of is left out."""
    assert parse_cards(SCRAPE) == {
        UUID: Card(
            {"gpu": "0", "name": "NVIDIA H200", "pci_bus_id": "0000:1b:00.0"},
            {"temperature_celsius": 41.0, "ecc_errors_total dram corrected": 3.0},
        )
    }


def test_labels_come_back_as_they_were() -> None:
    """Quotes, backslashes and line ends are escaped in the text."""
    assert parse_labels(r'name="a \"b\" \\ \n",gpu="0"') == {"name": 'a "b" \\ \n', "gpu": "0"}


def test_a_value_within_its_room_agrees_and_one_beyond_it_differs() -> None:
    """Two degrees; what was said lies between our two scrapes."""
    assert judged("temperature_celsius", 41, "temperature.gpu", "43") is Finding.AGREED
    assert judged("temperature_celsius", 41, "temperature.gpu", "44") is Finding.DIFFERED


def test_a_count_has_no_room_at_all() -> None:
    """One error more is another number."""
    field = "ecc.errors.corrected.volatile.dram"
    assert judged("ecc_errors_total dram corrected", 3, field, "3") is Finding.AGREED
    assert judged("ecc_errors_total dram corrected", 3, field, "4") is Finding.DIFFERED


def test_what_only_one_side_has_differs_and_what_neither_has_does_not() -> None:
    """Absent where the card does not have it, and never 0."""
    assert judged("power_watts", None, "power.draw.instant", "77.1") is Finding.DIFFERED
    assert judged("power_watts", 77.1, "power.draw.instant", "[N/A]") is Finding.DIFFERED
    assert judged("power_watts", None, "power.draw.instant", "[N/A]") is Finding.NEITHER


def test_a_bit_of_the_mask_is_compared_with_its_own_reason() -> None:
    """Bit 0x4 is the power cap."""
    field = "clocks_event_reasons.active"
    assert judged("clock_event_active sw_power_cap", 1, field, "0x4") is Finding.AGREED
    assert judged("clock_event_active sw_power_cap", 1, field, "0x8") is Finding.DIFFERED


def test_a_field_that_nvidia_smi_does_not_know_is_not_asked() -> None:
    """That is no difference: another release knows it."""
    lines = judge(rounds({"temperature_celsius": 41}, {}), ["uuid", "name"])
    assert finding(lines, "temperature_celsius") is Finding.UNASKED


def test_a_counter_is_compared_with_the_area_below_a_gauge() -> None:
    """300 W for 9 s are 2,700 J; half of that is not."""
    told = {"power.draw": "300.00"}
    lines = judge(rounds({"energy_joules_total": 0}, told, 10, energy_joules_total=2700), EVERY)
    assert finding(lines, "energy_joules_total") is Finding.AGREED
    lines = judge(rounds({"energy_joules_total": 0}, told, 10, energy_joules_total=1350), EVERY)
    assert finding(lines, "energy_joules_total") is Finding.DIFFERED


def test_time_that_is_not_observed_is_a_fault_under_a_load_alone() -> None:
    """An idle card may write no samples; more than the time that passed is always wrong."""
    told = {"utilization.gpu": "50"}
    for phase, seconds, wanted in (
        ("full load", 9.0, Finding.AGREED),
        ("full load", 2.0, Finding.DIFFERED),
        ("idle", 2.0, Finding.UNASKED),
        ("idle", 20.0, Finding.DIFFERED),
    ):
        run = rounds({"observed_seconds_total": 0}, told, 10, observed_seconds_total=seconds)
        lines = judge([one._replace(phase=phase) for one in run], EVERY)
        assert finding(lines, "observed_seconds_total") is wanted, (phase, seconds)


def test_a_card_that_one_side_does_not_list_differs() -> None:
    """It is named by its UUID."""
    alone = [one._replace(before={}, after={}) for one in rounds({}, {})]
    assert [line.finding for line in judge(alone, EVERY)] == [Finding.DIFFERED]


def test_an_area_is_a_sum_of_trapezoids_and_nothing_where_a_value_is_missing() -> None:
    """Rounds are not exactly a second apart."""
    assert integral([0.0, 1.0, 3.0], [0.0, 10.0, 10.0]) == 25.0
    assert integral([0.0, 1.0], [1.0, None]) is None


def test_bus_ids_are_compared_as_the_kernel_writes_them() -> None:
    """NVML and nvidia-smi write eight digits of the domain."""
    assert kernel_bus("00000000:3B:00.0") == normal_bus_id("00000000:3B:00.0") == "0000:3b:00.0"


def test_the_sources_of_a_device_are_compared_one_by_one() -> None:
    """A minor that differs is a job on another's card."""
    text = f"Model: \t NVIDIA H200\nGPU UUID: \t {UUID}\nBus Location: \t 0000:1b:00.0\n"
    ours = parse_information(f"{text}Device Minor: \t 1\n")
    theirs = Device("0000:1b:00.0", UUID, 2)
    assert differences([ours], [ours], [UUID]) == []
    assert differences([ours], [theirs], [UUID]) == ["GPU 0: minor is 1 in /proc, 2 in NVML"]
    assert "another order" in differences([ours], [ours], ["GPU-other"])[0]


def test_a_record_names_no_machine() -> None:
    """Neither UUID, nor serial number, nor host name; cards stay apart."""
    text = f"<serial>156</serial><uuid>{UUID}</uuid> on gpu07, not on gpu077"
    hidden = masked(text, ["GPU-other", UUID], ["gpu07"])
    assert hidden == (
        "<serial>0</serial><uuid>GPU-00000000-0000-0000-0000-000000000001</uuid> "
        "on node, not on gpu077"
    )


def test_a_record_says_first_what_differed() -> None:
    """By card and metric, with both numbers."""
    about = About("2026-11-21", "NVIDIA H200", "580.1", 1, "6.1", 60.0, 60, "load.py", ())
    line = Line(UUID, "power_watts", Finding.DIFFERED, "1 | 2", "the sensor")
    text = page(about, [line], [UUID])
    assert text.startswith("# NVIDIA H200, driver 580.1: differs\n")
    assert "| 0 | `power_watts` | 1 \\| 2 | the sensor |" in text
    assert stem(about) == "2026-11-21-nvidia-h200-580.1"


SPLIT = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><gpu id="00000000:1B:00.0"><uuid>{UUID}</uuid><mig_devices>
<mig_device><index>0</index><gpu_instance_id>2</gpu_instance_id>
<compute_instance_id>0</compute_instance_id><fb_memory_usage><total>71424 MiB</total>
<reserved>0 MiB</reserved><used>17 MiB</used></fb_memory_usage></mig_device>
<mig_device><index>1</index><gpu_instance_id>9</gpu_instance_id>
<compute_instance_id>0</compute_instance_id><fb_memory_usage><total>N/A</total>
<used>N/A</used></fb_memory_usage></mig_device></mig_devices></gpu>
<gpu id="00000000:43:00.0"><uuid>GPU-other</uuid><mig_devices>None</mig_devices></gpu>
</nvidia_smi_log>"""
INSTANCES = f"""# TYPE gpulock_mig_info gauge
gpulock_mig_info{{gpu="0:gi2.ci0",uuid="MIG-a",parent_uuid="{UUID}",gi="2",ci="0"}} 1
gpulock_mig_info{{gpu="0:gi9.ci0",uuid="MIG-b",parent_uuid="{UUID}",gi="9",ci="0"}} 1
gpulock_mig_memory_used_bytes{{gpu="0:gi2.ci0",uuid="MIG-a"}} 17825792
gpulock_mig_memory_total_bytes{{gpu="0:gi2.ci0",uuid="MIG-a"}} 74893492224
"""


def test_instances_are_found_by_their_place_on_the_card() -> None:
    """nvidia-smi tells no UUID of them there, and no size of one that is not to be asked."""
    lines = instances.compare(SPLIT, INSTANCES)
    assert [(line.metric, line.finding) for line in lines] == [
        ("mig gi2 ci0 memory_total_bytes", Finding.AGREED),
        ("mig gi2 ci0 memory_used_bytes", Finding.AGREED),
        ("mig gi9 ci0 memory_total_bytes", Finding.NEITHER),
        ("mig gi9 ci0 memory_used_bytes", Finding.NEITHER),
    ]


def test_an_instance_that_one_side_does_not_list_differs() -> None:
    """Both ways round."""
    for answer, scrape in ((SPLIT, ""), ("<nvidia_smi_log/>", INSTANCES)):
        found = {line.finding for line in instances.compare(answer, scrape)}
        assert found == {Finding.DIFFERED}
