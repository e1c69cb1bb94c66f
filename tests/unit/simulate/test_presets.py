# SPDX-License-Identifier: Apache-2.0
"""The machines: their topology in /sys and what NVML would tell of them."""

from __future__ import annotations

import posixpath
from itertools import combinations

import pytest

from gpulock.simulate.driver import sys_tree
from gpulock.simulate.machine import Machine, format_machine_inventory
from gpulock.simulate.presets import PRESETS
from gpulock.simulate.tree import LinkEntry

BOOT = "655093e2-805d-4ce3-ab9a-f45e03407edc"


def facts(machine: Machine) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in format_machine_inventory(machine, BOOT).splitlines()[1:]
    )


def shared_bridges(machine: Machine, first: int, second: int) -> list[str]:
    paths = [machine.gpus[index].bridges for index in (first, second)]
    return [bridge for bridge in paths[0] if bridge in paths[1]]


@pytest.mark.parametrize("preset", PRESETS)
def test_gpus_are_in_bus_order_and_no_minor_is_given_twice(preset: str) -> None:
    gpus = PRESETS[preset].gpus
    assert [gpu.bus for gpu in gpus] == sorted(gpu.bus for gpu in gpus)
    assert sorted(gpu.minor for gpu in gpus) == list(range(len(gpus)))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_link_in_sys_leads_to_something(preset: str) -> None:
    tree = sys_tree(PRESETS[preset])
    folders = {posixpath.dirname(path) for path in tree}
    targets = [
        posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        for path, entry in tree.items()
        if isinstance(entry, LinkEntry)
    ]
    assert targets
    assert set(targets) <= folders


def test_the_place_of_a_gpu_is_the_target_of_its_link() -> None:
    tree = sys_tree(PRESETS["dgx1"])
    assert tree["sys/bus/pci/devices/0000:06:00.0"] == LinkEntry(
        "../../../devices/pci0000:00/0000:00:02.0/0000:03:00.0/0000:04:08.0/0000:06:00.0"
    )
    folder = "sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0/0000:83:08.0/0000:85:00.0"
    assert tree[f"{folder}/numa_node"] == b"1\n"
    assert tree[f"{folder}/local_cpulist"] == b"20-39,60-79\n"


@pytest.mark.parametrize("preset", ["dgx1", "k80-node"])
def test_two_gpus_share_a_switch(preset: str) -> None:
    machine = PRESETS[preset]
    near = {pair for pair in combinations(range(8), 2) if shared_bridges(machine, *pair)}
    assert near == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_no_gpus_share_a_switch_where_each_has_its_own() -> None:
    for preset in ("dgx-h200", "workstation"):
        machine = PRESETS[preset]
        pairs = combinations(range(len(machine.gpus)), 2)
        assert not [pair for pair in pairs if shared_bridges(machine, *pair)]


def test_on_the_big_machine_a_pair_is_nearer_than_a_quad() -> None:
    machine = PRESETS["big"]
    assert len(shared_bridges(machine, 0, 1)) > len(shared_bridges(machine, 0, 2)) > 1
    assert not shared_bridges(machine, 0, 4)


def test_a_machine_of_one_node_does_not_tell_it() -> None:
    tree = sys_tree(PRESETS["workstation"])
    folder = "sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0"
    assert tree[f"{folder}/numa_node"] == b"-1\n"
    assert tree[f"{folder}/local_cpulist"] == b"0-31\n"


def test_the_cube_mesh_has_six_links_a_card() -> None:
    found = facts(PRESETS["dgx1"])
    links = {key: int(value) for key, value in found.items() if key.startswith("link.")}
    assert links["link.0000:06:00.0.0000:85:00.0"] == 2
    assert links["link.0000:06:00.0.0000:07:00.0"] == 1
    assert "link.0000:06:00.0.0000:86:00.0" not in links
    for gpu in PRESETS["dgx1"].gpus:
        assert sum(count for key, count in links.items() if gpu.bus in key) == 6


def test_a_fallen_card_is_in_neither_inventory_nor_sys() -> None:
    machine = PRESETS["missing"]
    assert "0000:07:00.0" not in format_machine_inventory(machine, BOOT)
    assert not [path for path in sys_tree(machine) if "0000:07:00.0" in path]
    assert "link.0000:06:00.0.0000:0a:00.0=1\n" in format_machine_inventory(machine, BOOT)


def test_the_inventory_begins_with_version_and_boot() -> None:
    lines = format_machine_inventory(PRESETS["dgx-h200"], BOOT).splitlines()
    assert lines[:2] == ["gpulock-inventory 1", f"boot_id={BOOT}"]
    assert "gpu.0000:1b:00.0.nvswitch=1" in lines
    assert "gpu.0000:1b:00.0.memory_mib=143771" in lines
    assert not [line for line in lines if line.startswith("link.")]


def test_uuids_that_the_driver_does_not_show_are_in_the_inventory() -> None:
    machine = PRESETS["k80-node"]
    found = facts(machine)
    uuids = {found[f"gpu.{gpu.bus}.uuid"] for gpu in machine.gpus}
    assert len(uuids) == 8
    assert not [uuid for uuid in uuids if "?" in uuid]


def test_a_card_in_mig_mode_has_instances_and_no_fabric() -> None:
    found = facts(PRESETS["a100-mig"])
    assert found["gpu.0000:07:00.0.mig"] == "1"
    assert "gpu.0000:07:00.0.nvswitch" not in found
    assert found["gpu.0000:47:00.0.mig"] == "0"
    assert found["gpu.0000:47:00.0.nvswitch"] == "1"
    assert found["mig.0000:07:00.0.gi9.ci0.profile"] == "1g.10gb"
    assert found["mig.0000:07:00.0.gi9.ci0.memory_mib"] == "9728"
    uuids = [value for key, value in found.items() if key.endswith(".ci0.uuid")]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("MIG-") for uuid in uuids)


def test_presets_cover_what_parsers_get_wrong() -> None:
    indices = {
        name: [gpu.minor for gpu in machine.gpus] == list(range(len(machine.gpus)))
        for name, machine in PRESETS.items()
    }
    assert not indices["dgx-h200"]
    assert indices["dgx1"]
    assert len(PRESETS["big"].gpus) > 10
    assert not PRESETS["k80-node"].initialised


def test_taking_fewer_gpus_takes_their_links_only() -> None:
    machine = PRESETS["dgx1"].take(2)
    assert [gpu.bus for gpu in machine.gpus] == ["0000:06:00.0", "0000:07:00.0"]
    assert machine.links == ((0, 1, 1),)
