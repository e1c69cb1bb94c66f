# SPDX-License-Identifier: Apache-2.0
"""The inventory: what only NVML can tell of the devices, for the hooks."""

from __future__ import annotations

from pathlib import Path

from gpulock_exporter.files.publish import (
    ExporterFolder,
)

from gpulock.node import device_list
from gpulock.node.devices import Device as DriverDevice
from tests.support.exporter_nodes import card, instance, uuid
from tests.support.trees import BOOT, bus


def test_the_inventory_is_read_by_the_hooks(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    folder.open()
    cards = {
        bus(0): card(0, mig=False, links={bus(1): 4, bus(2): 4, "switch": 2, "junk": 9}),
        bus(1): card(1, mig=False, links={bus(0): 3}),
        bus(2): card(2, mig=True, links={bus(0): 4, "switch": 2}),
        f"{bus(2)}.gi1.ci0": instance(2, 1),
        f"{bus(2)}.gi2.ci0": instance(2, 2, uuid=""),
    }
    folder.write_inventory(cards, BOOT)
    pairs = device_list.read_nvml_inventory(str(tmp_path), BOOT)
    assert device_list.nvlink_counts(pairs) == {(bus(0), bus(1)): 3, (bus(1), bus(0)): 3}
    assert f"gpu.{bus(2)}.nvswitch" not in pairs, "in MIG mode its links are off"
    plain = [DriverDevice(bus(number), number) for number in range(3)]
    found = device_list.apply_nvml_inventory(plain, pairs)
    assert [one.id for one in found] == [bus(0), bus(1), f"{bus(2)}.gi1.ci0"]
    assert [one.switched for one in found] == [True, False, False]
    assert (found[0].uuid, found[0].memory_mib) == (uuid(0), 81920)
    assert (found[2].profile, found[2].memory_mib) == ("1g.10gb", 10240)


def test_the_inventory_is_written_when_it_changes_or_is_gone(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    path = tmp_path / "inventory"
    folder.write_inventory({bus(0): card(0, links={bus(1): 4}), bus(1): card(1)}, BOOT)
    first = path.stat().st_ino
    folder.write_inventory({bus(0): card(0), bus(1): card(1)}, BOOT)  # links are told seldom
    assert path.stat().st_ino == first
    path.unlink()
    folder.write_inventory({bus(0): card(0), bus(1): card(1)}, BOOT)
    assert "link." in path.read_text()
    folder.write_inventory({bus(0): card(0)}, BOOT)
    assert "link." not in path.read_text()
