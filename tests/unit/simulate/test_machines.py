# SPDX-License-Identifier: Apache-2.0
"""The machines: what their driver prints, their topology in /sys, what NVML would tell of them."""

from __future__ import annotations

from gpulock.simulate import driver
from gpulock.simulate.presets import PRESETS


def test_capability_minors_are_those_of_the_drivers_table() -> None:
    # NVIDIA MIG user guide, "Device Nodes and Capabilities".
    lines = driver.format_mig_minors().splitlines()
    assert lines[:4] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    assert {"gpu0/gi1/access 12", "gpu1/gi0/access 138", "gpu3/gi1/ci0/access 418"} < {*lines}
    assert len(lines) == 2 + 32 * 15 * 9


def test_the_place_of_a_gpu_is_the_target_of_its_link() -> None:
    tree = driver.sys_tree(PRESETS["dgx1"])
    assert tree["sys/bus/pci/devices/0000:06:00.0"] == (
        "../../../devices/pci0000:00/0000:00:02.0/0000:03:00.0/0000:04:08.0/0000:06:00.0"
    )
    folder = "sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0/0000:83:08.0/0000:85:00.0"
    assert tree[f"{folder}/numa_node"] == b"1\n"
    unknown = driver.sys_tree(PRESETS["workstation"])
    assert unknown["sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0/numa_node"] == b"-1\n"
