# SPDX-License-Identifier: Apache-2.0
"""The driver's own list of devices: who waits for it, and when it is read again."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from gpulock_exporter.state.node_devices import DeviceList, inventory_version

from gpulock.errors import BROKEN, Refusal
from gpulock.node.devices import Device
from gpulock.store import atomic
from tests.support.exporter_nodes import (
    listed,
)
from tests.support.trees import bus


def test_the_drivers_list_is_what_was_read_last() -> None:
    answers: list[list[Device] | Refusal] = [
        [listed(0)],
        Refusal(BROKEN, "no NVIDIA driver", "load it"),
    ]

    def read() -> list[Device]:
        answer = answers.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    found = DeviceList(read)
    assert (found.devices, found.fault) == (None, "not listed yet")
    found.read()
    assert found.devices is not None
    assert ([one.id for one in found.devices], found.fault) == ([bus(0)], "")
    found.read()
    assert (found.devices, found.fault) == ([], "no NVIDIA driver")


def test_another_inventory_is_seen_before_the_list_is_due() -> None:
    version, reads = [1], queue.Queue[None]()

    def count() -> list[Device]:
        reads.put(None)
        return []

    found = DeviceList(count, lambda: version[0], period=3600)
    found.start()
    reads.get(timeout=10)
    version[0] = 2
    found.refresh_if_changed()
    reads.get(timeout=10)
    found.stop()


def test_an_inventory_that_is_replaced_is_another_one(tmp_path: Path) -> None:
    assert inventory_version(str(tmp_path)) == (0, 0, 0)
    versions: list[tuple[int, int, int]] = []
    for text in ("a", "ab"):
        atomic.replace_file(f"{tmp_path}/inventory", text.encode())
        versions.append(inventory_version(str(tmp_path)))
    assert len({(0, 0, 0), *versions}) == 3


def test_a_driver_that_hangs_hangs_only_who_reads_its_list() -> None:
    hanging, go_on = threading.Event(), threading.Event()

    def read() -> list[Device]:
        hanging.set()
        go_on.wait(10)
        return [listed(0)]

    found = DeviceList(read, period=0.01)
    found.start()
    assert hanging.wait(10)
    assert found.devices is None
    found.stop()
    go_on.set()
