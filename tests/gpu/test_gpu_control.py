# SPDX-License-Identifier: Apache-2.0
"""What a card answered is what the double answers once it was fed with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.control import keys, lines, own_fields
from tests.nvml.double import Double

ROOT = Path(__file__).resolve().parents[2]
CHANGED = {
    "gpu0.temperature": 71,
    "gpu0.power": 412_345,
    "gpu0.power.limit": 600_000,
    "gpu0.clock.sm": 1755,
    "gpu0.memory.used": "9123M",
    "gpu0.utilization.memory": 37,
    "gpu0.ecc.volatile.corrected.dram": 5,
    "gpu0.remapped.correctable": 2,
    "gpu0.recovery_action": 1,
    "gpu0.temperature.margin": None,
}
ALL_TIME = ("energy", "pcie.tx_bytes", "pcie.rx_bytes")  # run on while they are asked for


def raw(nvml: Double) -> dict[str, Any]:
    """Return what is written down of a double."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/raw.py")],
        env={**os.environ, **nvml.env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return dict(json.loads(done.stdout))


def test_a_double_that_is_fed_with_answers_gives_the_same_answers(tmp_path: Path) -> None:
    """Another one of that card, which was idle; what it does not know is taken away."""
    table = own_fields((ROOT / "tests/nvml/fields.c").read_text())
    with Double(tmp_path / "card", preset="dgx-h200", gpus=1) as card:
        card.update(CHANGED)
        told = raw(card)["cards"][0]
        found = keys(told, table)
        for name in ALL_TIME:
            del found[name]
        with Double(tmp_path / "copy", preset="dgx-h200", gpus=1) as copy:
            before = keys(raw(copy)["cards"][0], table)
            copy.update({f"gpu0.{key}": None for key in before.keys() - found.keys()})
            copy.update({f"gpu0.{key}": value for key, value in found.items()})
            again = keys(raw(copy)["cards"][0], table)
    assert again == found
    assert before["temperature"] != found["temperature"] == "71"
    assert "temperature.margin" in before
    assert "temperature.margin" not in found
    assert len(found) > 80


def test_a_driver_that_could_not_be_asked_gives_no_keys() -> None:
    """The error is in nvml.json."""
    assert lines("1: NVML is not there") == "# NVML could not be asked\n"
