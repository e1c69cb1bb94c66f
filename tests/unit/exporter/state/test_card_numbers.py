# SPDX-License-Identifier: Apache-2.0
"""A card keeps its number for the boot: series and tiles of others do not change when one goes."""

from __future__ import annotations

from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.collector_state import ExporterMemory
from gpulock_exporter.state.device_totals import TelemetryTotals

from gpulock.node.devices import Device
from tests.support.exporter_nodes import Node, card, instance, listed
from tests.support.trees import bus


def shifted(number: int, index: int) -> Device:
    """Return a card in the driver's list, where those behind a card that is gone move up."""
    found = listed(number)
    found.index = index
    return found


def looked(number: int, index: int) -> DeviceTelemetry:
    return card(number, index=index)


def labels(node: Node, *found: Device) -> dict[str, str]:
    """Return the label of each device by the number of its bus."""
    return {one.id: one.gpu_label for one in node.snapshot(found).devices}


def test_a_card_that_comes_later_gets_the_lowest_number_that_is_free_and_keeps_it() -> None:
    node = Node(gpus=4)
    node.tick(looked(0, 0), looked(2, 1), looked(3, 2))
    node.snapshot([shifted(0, 0), shifted(2, 1), shifted(3, 2)])
    node.tick(*(card(n) for n in range(4)))
    found = labels(node, *(listed(n) for n in range(4)))
    assert found == {bus(0): "0", bus(1): "3", bus(2): "1", bus(3): "2"}
    after = Node(ExporterMemory(TelemetryTotals(node.book.memory.totals.devices)))
    after.now = node.now
    after.tick(looked(0, 0), looked(1, 1))
    assert labels(after, shifted(0, 0), shifted(1, 1))[bus(1)] == "3", "over a restart"


def test_an_instance_has_the_number_of_its_card() -> None:
    node = Node()
    node.tick(card(0), card(1, mig=True), instance(1, 2))
    node.snapshot([listed(0), listed(1, "gi2.ci0")])
    node.tick(looked(1, 0), instance(1, 2, index=0))
    part = shifted(1, 0)
    part.id = f"{bus(1)}.gi2.ci0"
    assert labels(node, part)[part.id] == "1:gi2.ci0"


def test_a_card_that_cuda_does_not_count_has_no_number() -> None:
    node = Node()
    node.tick(card(0))
    assert labels(node, shifted(0, -1)) == {bus(0): ""}
    node.snapshot([listed(0)])
    assert labels(node, shifted(0, -1)) == {bus(0): ""}, "whatever it had before"
