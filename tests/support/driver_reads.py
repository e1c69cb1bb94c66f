# SPDX-License-Identifier: Apache-2.0
"""Reads of the driver, each with whether the gate was held."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from gpulock.node import device_list
from gpulock.node.devices import Device


def is_gate_held(records: Path) -> bool:
    """Return whether somebody holds the gate beside the records."""
    path = records / "gate"
    if not path.exists():
        return False
    with path.open("r+") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def observe_driver_reads(records: Path, patch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each read of the driver from now on whether the gate was held."""
    reads: list[bool] = []
    read = device_list.read_devices

    def observed(*args: Any) -> list[Device]:
        reads.append(is_gate_held(records))
        return read(*args)

    patch.setattr(device_list, "read_devices", observed)
    return reads
