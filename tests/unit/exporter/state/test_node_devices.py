# SPDX-License-Identifier: Apache-2.0
"""The driver's own list of devices: who waits for it, and when it is read again."""

from __future__ import annotations

import threading

from gpulock_exporter.state.node_devices import DeviceList

from gpulock.errors import BROKEN, Refusal
from gpulock.node.devices import Device
from tests.support.exporter_nodes import (
    listed,
)
from tests.support.trees import bus


def test_the_drivers_list_is_what_was_read_last() -> None:
    answers: list[list[Device] | Refusal] = [
        [listed(0)],
        Refusal(BROKEN, "no NVIDIA driver", "load it"),
        [],
    ]

    def read() -> list[Device]:
        answer = answers.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    found = DeviceList(read)
    told: list[list[str] | None] = []
    for _ in range(3):
        told.append(None if found.devices is None else [one.id for one in found.devices])
        found.read()
    assert told == [None, [bus(0)], []]


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
