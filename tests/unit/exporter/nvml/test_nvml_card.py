# SPDX-License-Identifier: Apache-2.0
"""What a look tells of each card, on the double of NVML."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpulock_exporter.frame import DeviceTelemetry

from gpulock.simulate.node import write_simulated_node
from tests.nvml.double import (
    ERROR_NO_PERMISSION,
    ERROR_NOT_SUPPORTED,
    ERROR_UNKNOWN,
    Double,
    Process,
)
from tests.support.exporter_nvml import Eye, device

PERIOD = 166_667  # microseconds between two samples
ERROR_INSUFFICIENT_SIZE = 7


def absent(card: DeviceTelemetry) -> set[str]:
    return {name for name, value in vars(card).items() if value is None}


def test_a_busy_card_is_told_in_base_units(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", driver="590.48.01", gpus=2) as nvml:
        nvml.load(0, 87)
        nvml.update(
            {
                "gpu0.utilization.memory": 12,
                "gpu0.memory.used": "8G",
                "gpu0.power.instant": 512_300,
                "gpu0.energy": 7_500,
                "gpu0.temperature": 71,
                "gpu0.clock.sm": 1980,
                "gpu0.clocks.reasons": 0x24,
                "gpu0.violation.power": 2_500_000_000,
                "gpu0.ecc.volatile.corrected.sram": 3,
                "gpu0.remapped.uncorrectable": 1,
                "gpu0.remapped.pending": 1,
                "gpu0.recovery_action": 2,
                "gpu0.nvlink.*.tx_kib": 5,
                "gpu0.nvlink.*.rx_kib": 7,
                "gpu0.nvlink.3.state": 0,
                "gpu0.nvlink.errors.replay": 9,
                "gpu0.pcie.width": 8,
                "gpu0.pcie.generation": 1,
                "gpu0.pcie.replays": 7,
            }
        )
        with Eye(nvml) as eye:
            frame = eye.look(processes=True)
            card, other = device(frame, 0), device(frame, 1)
    assert frame.driver == "590.48.01"
    assert frame.failures == {}
    assert (card.bus, card.index, card.minor, card.numa) == ("0000:1b:00.0", 0, 4, 0)
    assert card.uuid.startswith("GPU-")
    assert card.name == "NVIDIA H200"
    assert (card.utilization, card.memory_utilization) == (0.87, 0.12)
    assert (card.memory_used, card.memory_total) == (8 << 30, 143771 << 20)
    assert (card.power, card.energy, card.temperature) == (512.3, 7.5, 71.0)
    assert (card.sm_clock, card.memory_clock) == (1.98e9, 3.201e9)
    assert card.clock_reasons == 0x24
    assert card.clock_reason_seconds is not None
    assert card.clock_reason_seconds["sw_power_cap"] == 2.5
    assert card.clock_reason_seconds["hw_thermal_slowdown"] == 0.0
    assert card.ecc is not None
    assert card.ecc["corrected.sram"] == 3
    assert card.remapped == {"correctable": 0, "uncorrectable": 1}
    assert (card.remap_pending, card.remap_failure, card.recovery_action) == (True, False, 2)
    assert (card.nvlink_transmit, card.nvlink_receive) == (18 * 5 * 1024, 18 * 7 * 1024)
    link = card.pcie_width, card.pcie_width_max, card.pcie_generation, card.pcie_generation_max
    assert (*link, card.pcie_replays, card.nvlink_active) == (8, 16, 1, 5, 7, 17)
    assert card.nvlink_errors == {"crc_flit": 0, "crc_data": 0, "replay": 9, "recovery": 0}
    assert (card.power_limit, card.power_limit_enforced, card.memory_temperature) == (700, 700, 32)
    assert (card.answer or 0) > 0 and card.fan is None
    assert card.links == {"switch": 17}
    assert (card.mig, card.persistence, card.processes) == (False, True, {})
    assert other.utilization == 0
    assert other.remap_pending is False


def test_busy_seconds_are_those_of_the_buffer(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="workstation") as nvml:
        now = round(time.time() * 1e6)
        first = [(now + n * PERIOD, 40) for n in range(6)]
        nvml.samples(0, first)
        with Eye(nvml) as eye:
            assert device(eye.look()).observed == 0, "what was before our time is not counted"
            more = [(now + n * PERIOD, 70) for n in range(6, 12)]
            nvml.samples(0, first + more)
            card = device(eye.look())
            assert card.observed == pytest.approx(1.0, rel=1e-3)
            assert card.busy == pytest.approx(0.7, rel=1e-3)
            assert device(eye.look()).observed == 0, "the same samples once more"
            garbage = [(now + 12 * PERIOD + n * 10_000, 900) for n in range(1, 101)]
            nvml.samples(0, garbage)
            frames = [eye.look() for _ in range(5)]
            found = [(device(one).busy, device(one).observed) for one in frames]
            assert found == [(0, 0)] * 5
            assert frames[0].failures == {"utilization": f"{card.bus}: its samples are impossible"}


def test_without_a_buffer_a_look_stands_for_the_time_since_the_last(tmp_path: Path) -> None:
    hidden = ("nvmlDeviceGetSamples",)
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1, hidden=hidden) as nvml, Eye(nvml) as eye:
        nvml.load(0, 40)
        for after in (1, 3):
            eye.look(after=after)
        before = eye.look(after=5)
        frame = eye.look(after=11)
        card, passed = device(frame), frame.boottime - before.boottime
        assert card.observed == pytest.approx(passed)
        assert card.busy == pytest.approx(0.4 * passed)


NONE, ALL_ONES = 0xFFFFFFFF, (1 << 64) - 1


@pytest.mark.parametrize(
    ("driver", "found"),
    [("570.211.01", 2.0), ("575.51.02", 3.0), ("580.65.06", 3.0), ("580.82.07", 2.0)],
)
def test_reasons_are_read_where_the_header_of_the_driver_has_them(
    tmp_path: Path, driver: str, found: float
) -> None:
    """With nvml.h of 575.51 to 580.76 the other three numbers are settings of power."""
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1, driver=driver) as nvml:
        for name in ("sw_thermal", "hw_thermal", "hw_power_brake"):
            nvml.set(f"gpu0.violation.{name}", 2_000_000_000)
            nvml.set(f"gpu0.violation.lower.{name}", 3_000_000_000)
        with Eye(nvml) as eye:
            told = device(eye.look()).clock_reason_seconds or {}
    late = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
    assert [told[name] for name in late] == [found] * 3


GARBAGE = {  # and what is absent then: NVML calls all ones not available, without a failure
    "ecc.volatile.uncorrected.sram": (NONE, "ecc"),
    "ecc.volatile.corrected.sram": (ALL_ONES, "ecc"),
    "ecc.volatile.corrected.dram": (ALL_ONES, "ecc"),
    "ecc.volatile.uncorrected.dram": (ALL_ONES, "ecc"),
    "clocks.reasons": (NONE, "clock_reasons"),
    "remapped.pending": (7, "remap_pending"),
    "remapped.failure": (2, "remap_failure"),
    "temperature.memory": (0, "memory_temperature"),  # no sensor
    "persistence": (NONE, "persistence"),
    "memory.total": (0, "memory_total"),
    "memory.used": (0, "memory_used"),
    "memory.reserved": (0, "memory_used"),
}


def test_what_no_card_can_say_is_absent(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml, Eye(nvml) as eye:
        usual = absent(device(eye.look()))
        nvml.update({f"gpu0.{key}": value for key, (value, _) in GARBAGE.items()})
        frame = eye.look(after=6)
        gone = absent(device(frame)) - usual
        assert gone - {"gpm", "pcie_transmit"} == {name for _, name in GARBAGE.values()}
        assert set(frame.failures) == {"remapped"}
        nvml.set("gpu0.persistence", 0)
        assert device(eye.look(after=6)).persistence is False


def test_what_a_card_does_not_have_is_absent_and_asked_for_again_but_rarely(tmp_path: Path) -> None:
    node = write_simulated_node(tmp_path / "node", "dgx1", 1)
    (path,) = node.driver_root.glob("gpus/*/information")
    path.write_text(path.read_text().replace("Tesla V100-SXM2-32GB", "Tesla K80"))
    old = Double(tmp_path / "nvml", node=node.directory, driver="418.87.00")
    with old as nvml, Eye(nvml) as eye:
        card = device(eye.look(processes=True))
        assert card.power == 30.0, "by a call of its own: the field is newer than this driver"
        assert (card.temperature, card.clock_reasons) == (36.0, 1)
        for name in ("energy", "gpm", "links", "remapped", "pcie_transmit", "nvlink_transmit"):
            assert getattr(card, name) is None, name
        assert (card.mig, card.clock_reason_seconds, card.recovery_action) == (None, None, None)
        assert card.processes == {}, "by the list of the first version"
        before = nvml.calls()
        eye.look(processes=True)
        rare = ("nvmlDeviceGetMigMode", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMemoryInfo_v2")
        assert not (nvml.calls() - before).keys() & set(rare)
        nvml.set("gpu0.energy", 5000)
        eye.look(after=400)
        assert device(eye.look()).energy == 5.0


@pytest.mark.parametrize("filled", ["zeros", "untouched"])
def test_field_values_that_nobody_filled_in_are_absent_and_no_zeros(
    tmp_path: Path, filled: str
) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml:
        nvml.set("gpu0.fields.filled", filled)
        with Eye(nvml) as eye:
            eye.look()
            frame = eye.look()
    card = device(frame)
    by_fields = ("energy", "clock_reason_seconds", "remapped", "remap_pending", "remap_failure")
    told = {name: getattr(card, name) for name in (*by_fields, "recovery_action", "pcie_replays")}
    assert told == dict.fromkeys(told)
    assert (card.nvlink_errors, card.nvlink_active) == (None, None)
    assert set(card.ecc or ()) <= {"corrected.sram", "uncorrected.sram"}
    assert (card.power, frame.failures) == (77.67, {})


@pytest.mark.parametrize(
    ("keys", "coherent"),
    [
        ({}, None),
        ({"numa_node_id": 1}, True),
        ({"addressing_mode": 1}, False),
        ({"addressing_mode": 2}, True),
    ],
)
def test_a_card_whose_memory_the_kernel_uses_itself_says_so(
    tmp_path: Path, keys: dict[str, int], coherent: bool | None
) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1, driver="580.65.06") as nvml:
        nvml.update({f"gpu0.{key}": value for key, value in keys.items()})
        with Eye(nvml) as eye:
            frame = eye.look()
            assert (device(frame).coherent, frame.failures) == (coherent, {})


@pytest.mark.parametrize("total", [None, 0])
def test_the_memory_of_a_card_that_has_none_of_its_own_is_that_of_its_processes(
    tmp_path: Path, total: int | None
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml:
        nvml.update({"gpu0.memory.total": total, "gpu0.memory.used": 0, "gpu0.memory.reserved": 0})
        with Eye(nvml) as eye:
            assert device(eye.look()).memory_used is None, "no list yet"
            nvml.processes(0, [Process(71, "512M"), Process(72, "1G", "G")])
            eye.look(processes=True)
            card = device(eye.look())
            assert (card.memory_used, card.memory_total) == (1536 << 20, None)
            nvml.processes(0, [Process(71, "512M"), Process(72, "-")])
            eye.look(processes=True)
            assert device(eye.look()).memory_used is None, "the driver tells no sum"
            nvml.processes(0, [])
            eye.look(processes=True)
            assert device(eye.look()).memory_used == 0
            nvml.fail("nvmlDeviceGetComputeRunningProcesses*", ERROR_UNKNOWN)
            eye.look(processes=True)
            assert device(eye.look()).memory_used is None


def test_the_processes_of_all_kinds_are_told_once_each(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml, Eye(nvml) as eye:
        nvml.processes(
            0,
            [
                Process(30, "1M"),
                Process(10, "2M", "G"),
                Process(30, "5M", "G"),
                Process(10, "1M", "M"),
                Process(20, "-", "M"),
            ],
        )
        found = device(eye.look(processes=True)).processes
        assert found == {10: 2 << 20, 20: None, 30: 5 << 20}
        assert device(eye.look()).processes is None, "nobody asked"


def test_a_process_list_that_grows_between_two_calls_is_asked_for_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml, Eye(nvml) as eye:
        nvml.processes(0, [Process(n, "1M") for n in range(1, 80)], growth=40)
        found = device(eye.look(processes=True)).processes
        assert found is not None
        assert len(found) > 79
        nvml.fail("nvmlDeviceGetComputeRunningProcesses_v3", ERROR_INSUFFICIENT_SIZE)
        frame = eye.look(processes=True)
        assert device(frame).processes is None
        assert "Insufficient Size" in frame.failures["processes"]
        nvml.reset()
        nvml.processes(0, [Process(n, "1M") for n in range(1, 6000)])
        frame = eye.look(processes=True)
        assert device(frame).processes is None
        assert "more than 5000" in frame.failures["processes"]


# a call, whose failure it is, and what is absent then
FAILING: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nvmlDeviceGetUtilizationRates", "utilization", ("utilization", "memory_utilization")),
    ("nvmlDeviceGetSamples", "utilization", ()),
    ("nvmlDeviceGetMemoryInfo*", "memory", ("memory_used", "memory_total")),
    ("nvmlDeviceGetTemperature*", "temperature", ("temperature",)),
    ("nvmlDeviceGetClockInfo", "clocks", ("sm_clock", "memory_clock")),
    ("nvmlDeviceGetCurrentClocks*", "clocks", ("clock_reasons",)),
    ("nvmlDeviceGetFieldValues.186", "power", ("power",)),
    ("nvmlDeviceGetFieldValues.83", "power", ("energy",)),
    ("nvmlDeviceGetFieldValues.11", "ecc", ()),
    ("nvmlDeviceGetFieldValues.144", "remapped", ("remap_pending",)),
    ("nvmlDeviceGetFieldValues.138", "nvlink", ("nvlink_transmit", "nvlink_receive")),
    ("nvmlDeviceGetMemoryErrorCounter", "ecc", ()),
    ("nvmlDeviceGetFieldValues.82", "temperature", ("memory_temperature",)),
    ("nvmlDeviceGetFieldValues.94", "pcie", ("pcie_replays",)),
    ("nvmlDeviceGetFieldValues.38", "nvlink", ()),
    ("nvmlDeviceGetEnforcedPowerLimit", "power", ("power_limit_enforced",)),
    ("nvmlDeviceGetCurrPcieLinkWidth", "pcie", ("pcie_width",)),
    ("nvmlDeviceGetPersistenceMode", "devices", ("persistence",)),
    ("nvmlGpmMetricsGet", "gpm", ("gpm", "nvlink_summed", "pcie_transmit", "pcie_receive")),
    ("nvmlDeviceGetMigMode", "mig", ()),
)


def test_a_call_that_fails_costs_one_value_of_one_card(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml, Eye(nvml) as eye:
        nvml.update({"gpu*.nvlink.*.tx_kib": 5, "gpu*.nvlink.*.rx_kib": 7})
        nvml.processes(0, [Process(71, "1M")])
        eye.look(processes=True)  # memory that cannot be read is not made up from these
        usual = absent(device(eye.look(after=6)))
        for call, collector, names in FAILING:
            gpu = None if call == "nvmlGpmMetricsGet" else 0  # that call names no card
            nvml.fail(call, ERROR_UNKNOWN, gpu=gpu)
            frame = eye.look(after=6)
            told = [f"{one.bus}: Unknown Error" for one in frame.devices[: 1 if gpu == 0 else 2]]
            assert frame.failures == {collector: "; ".join(told)}, "each card that failed"
            assert absent(device(frame, 0)) - usual == set(names), call
            assert absent(device(frame, 1)) - usual == (set() if gpu == 0 else set(names))
            nvml.fail(call, 0, gpu=gpu)
            eye.look(after=6)
            frame = eye.look(after=6)
            assert frame.failures == {}
            assert absent(device(frame, 0)) == usual


def test_a_failure_of_what_is_read_rarely_is_told_until_it_is_read_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml, Eye(nvml) as eye:
        nvml.fail("nvmlDeviceGetFieldValues.11", ERROR_UNKNOWN)
        assert "ecc" in eye.look().failures
        nvml.reset()
        assert "ecc" in eye.look().failures
        assert "ecc" not in eye.look(after=6).failures


def test_bytes_over_pcie_are_no_counter_where_32_bits_hold_them(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1, driver="590.48.01") as nvml:
        nvml.update({"gpu0.pcie.tx_bytes": "6000", "gpu0.pcie.rx_bytes": "7000"})
        with Eye(nvml) as eye:
            assert device(eye.look()).pcie_transmit == 6000
            nvml.set("gpu0.pcie.tx_bytes", 5)  # it wrapped before it had filled 32 bits
            assert device(eye.look(after=6)).pcie_transmit is None
            nvml.set("gpu0.pcie.tx_bytes", 9000)
            assert device(eye.look(after=6)).pcie_transmit is None


def test_bytes_are_those_of_gpm_where_the_card_has_it(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml:
        nvml.update({"gpu0.gpm.20": 100, "gpu0.gpm.2": 40, "gpu0.gpm.5": 25.5})
        nvml.update({"gpu0.nvlink.*.tx_kib": 5, "gpu0.nvlink.*.rx_kib": 7})
        with Eye(nvml) as eye:
            first = eye.look()
            assert device(first).gpm is None
            second = eye.look()
            card, seconds = device(second), second.boottime - first.boottime
            assert card.gpm is not None
            assert (card.gpm["sm_active"], card.gpm["tensor_active"]) == (0.4, 0.255)
            assert card.pcie_transmit == pytest.approx(100 * (1 << 20) * seconds, abs=1)
            assert (card.nvlink_transmit, card.nvlink_summed) == (18 * 5 * 1024, False)
            again = device(eye.look(after=0.1))
            assert (again.gpm, again.pcie_transmit) == (card.gpm, card.pcie_transmit)
            nvml.update({"gpu0.gpm.60": 100, "gpu0.gpm.61": 200})
            nvml.fail("nvmlDeviceGetFieldValues.13[89]", ERROR_NOT_SUPPORTED)
            eye.look(after=6)
            card = device(eye.look())
            assert card.nvlink_summed is True, "where it does not count them itself"
            assert (card.nvlink_transmit or 0) > (card.nvlink_receive or 0) > 0


def test_a_list_that_failed_is_a_failure_until_it_is_asked_for_again(tmp_path: Path) -> None:
    call = "nvmlDeviceGetGraphicsRunningProcesses*"
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        nvml.processes(0, [Process(1, "1M")])
        nvml.fail(call, ERROR_NO_PERMISSION, gpu=0)
        frame = eye.look(processes=True)
        lists = [device(frame, number).processes for number in range(2)]
        assert lists == [None, {}], "the other lists are not all there are"
        for _ in range(2):
            told = {"processes": "0000:06:00.0: Insufficient Permissions"}
            assert eye.look().failures == told
        nvml.fail(call, 0, gpu=0)
        assert set(eye.look().failures) == {"processes"}, "nobody has asked again"
        assert eye.look(processes=True).failures == {}
        assert eye.look().failures == {}


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"fabric.state": 2, "fabric.status": 999}, 2),
        ({"fabric.state": 3}, 3),
        ({"fabric.state": 3, "fabric.status": 999}, 4),
        ({"fabric.state": 3, "fabric.mask": 0xAA | 1 << 8, "fabric.summary": 1}, 3),
        ({"fabric.state": 3, "fabric.mask": 0xAA | 1 << 8, "fabric.summary": 2}, 5),
        ({"fabric.state": 3, "fabric.mask": 0xA9}, 5),  # bandwidth is degraded
        ({"fabric.state": 3, "fabric.mask": 0x9A}, 5),  # a route is unhealthy
        ({"fabric.state": 3, "fabric.mask": 0xAA | 4 << 8}, 5),  # no partition
        ({"fabric.state": 3, "fabric.status": 999, "fabric.mask": 0xA9}, 4),
        ({"fabric.state": 2, "fabric.mask": 0xA9}, 2),
        ({}, None),
    ],
)
def test_a_card_behind_nvswitches_tells_whether_it_has_joined_their_fabric(
    tmp_path: Path, told: dict[str, int], state: int | None
) -> None:
    hidden = () if "fabric.mask" in told else ("nvmlDeviceGetGpuFabricInfoV",)
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1, hidden=hidden) as nvml:
        nvml.update({f"gpu0.{key}": value for key, value in told.items()})
        with Eye(nvml) as eye:
            frame = eye.look()
    assert (device(frame, 0).fabric, frame.failures) == (state, {})


# --- what a look costs the driver, and what it gives back -------------------------------------

ALWAYS, RARE = 8, 15  # calls of each card at each look, and at one that reads what is rare
FORBIDDEN = ("RunningProcesses", "PcieThroughput", "HandleByIndex", "NvLink", "Init")


def test_the_calls_of_a_look_at_eight_cards_are_so_many(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200") as nvml, Eye(nvml) as eye:
        for _ in range(8):
            eye.look()
        turns = 0
        for _ in range(10):
            before = nvml.calls()
            eye.look()
            made = nvml.calls() - before
            cards = made["nvmlDeviceGetPersistenceMode"]
            assert sum(made.values()) == 1 + 8 * ALWAYS + cards * RARE
            assert cards <= 3, "they take turns"
            assert not [call for call in made if any(part in call for part in FORBIDDEN)]
            turns += cards
        assert 14 <= turns <= 18, "each one every five seconds"
        before = nvml.calls()
        eye.look(processes=True)
        lists = [n for call, n in (nvml.calls() - before).items() if "RunningProcesses" in call]
        assert lists == [8, 8, 8], "each list of each card once"


def test_what_a_look_holds_is_given_back(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=2) as nvml, Eye(nvml) as eye:
        nvml.update({"gpu*.gpm": 1, "gpu1.mig.mode": 0})
        for _ in range(3):
            eye.look()
        nvml.set("reload", 1)
        for _ in range(3):
            eye.look()
        nvml.set("gpu1.uuid", "GPU-00000000-0000-0000-0000-00000000c0de")
        for _ in range(3):
            eye.look()
        eye.close()
        calls = nvml.calls()
        assert calls["nvmlGpmSampleAlloc"] == calls["nvmlGpmSampleFree"] > 0
        assert not nvml.held()
