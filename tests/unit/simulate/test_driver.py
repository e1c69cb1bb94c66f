# SPDX-License-Identifier: Apache-2.0
"""The files of the simulated driver, against what real ones print."""

from __future__ import annotations

from gpulock.simulate import driver
from gpulock.simulate.presets import PRESETS

# The lines of a K80 under driver 418 as a Colab machine shows them, UUID and BIOS as before use.
K80_REAL = (
    "Model: \t\t Tesla K80\n"
    "IRQ:   \t\t 33\n"
    "GPU UUID: \t GPU-????????-????-????-????-????????????\n"
    "Video BIOS: \t ??.??.??.??.??\n"
    "Bus Type: \t PCIe\n"
    "DMA Size: \t 40 bits\n"
    "DMA Mask: \t 0xffffffffff\n"
    "Bus Location: \t 0000:05:00.0\n"
    "Device Minor: \t 0\n"
    "Blacklisted:\t No\n"
)


def test_an_old_driver_before_its_first_client() -> None:
    machine = PRESETS["k80-node"]
    assert driver.format_gpu_information(machine, machine.gpus[0]) == K80_REAL


def test_a_driver_with_firmware_on_the_card_names_it() -> None:
    machine = PRESETS["dgx-h200"]
    lines = driver.format_gpu_information(machine, machine.gpus[7]).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "Model",
        "IRQ",
        "GPU UUID",
        "Video BIOS",
        "Bus Type",
        "DMA Size",
        "DMA Mask",
        "Bus Location",
        "Device Minor",
        "GPU Firmware",
        "GPU Excluded",
    ]
    assert lines[7:] == [
        "Bus Location: \t 0000:df:00.0",
        "Device Minor: \t 1",
        "GPU Firmware: \t 570.172.08",
        "GPU Excluded:\t No",
    ]


def test_a_card_without_firmware_says_so() -> None:
    machine = PRESETS["dgx1"]
    assert "GPU Firmware: \t N/A\n" in driver.format_gpu_information(machine, machine.gpus[0])


def test_the_version_has_the_two_lines_of_the_module() -> None:
    assert driver.format_driver_version(PRESETS["dgx1"].driver) == (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  "
        "Thu Oct 19 18:56:32 UTC 2023\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04) \n"
    )


def test_the_open_module_puts_its_version_elsewhere() -> None:
    first = driver.format_driver_version(PRESETS["dgx-h200"].driver).split("\n")[0]
    assert "Open Kernel Module for x86_64  570.172.08  Release Build" in first


def test_capability_minors_are_those_of_the_drivers_table() -> None:
    # NVIDIA MIG user guide, "Device Nodes and Capabilities".
    lines = driver.format_mig_minors().splitlines()
    assert lines[:4] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    assert "gpu0/gi1/access 12" in lines
    assert "gpu0/gi1/ci0/access 13" in lines
    assert "gpu1/gi0/access 138" in lines
    assert len(lines) == 2 + 32 * 15 * 9


def test_only_instances_that_exist_have_capability_files_named_by_the_cards_minor() -> None:
    machine = PRESETS["a100-mig"]
    tree = driver.driver_tree(machine)
    root = "proc/driver/nvidia/capabilities"
    assert machine.gpus[1].minor == 3
    assert tree[f"{root}/gpu3/mig/gi1/ci0/access"] == (
        b"DeviceFileMinor: 418\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    )
    assert tree[f"{root}/mig/config"] == (
        b"DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
    )
    folders = {path.split("/")[4] for path in tree if path.startswith(f"{root}/gpu")}
    assert folders == {"gpu2", "gpu3"}
    assert "gpu3/gi1/ci0/access 418" in driver.format_mig_minors()


def test_each_capability_has_its_device_file() -> None:
    devices = driver.device_tree(PRESETS["a100-mig"])
    assert "dev/nvidia-caps/nvidia-cap418" in devices
    assert not [path for path in driver.device_tree(PRESETS["dgx1"]) if "caps" in path]


def test_a_driver_older_than_a_file_does_not_have_it() -> None:
    old = driver.driver_tree(PRESETS["k80-node"])
    new = driver.driver_tree(PRESETS["dgx1"])
    for name in (
        "proc/driver/nvidia-caps/mig-minors",
        "proc/driver/nvidia/capabilities/mig/config",
    ):
        assert name not in old
        assert name in new
