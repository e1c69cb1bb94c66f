# SPDX-License-Identifier: Apache-2.0
"""What a look costs the driver, and what it gives back."""

from __future__ import annotations

from pathlib import Path

from tests.nvml.double import Double
from tests.support.exporter_nvml import Eye

ALWAYS, RARE = 12, 11  # calls of each card at each look, and at one that reads what is rare
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
