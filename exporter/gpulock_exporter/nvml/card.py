# SPDX-License-Identifier: Apache-2.0
"""One card: who it is, what it keeps from one look to the next, and its MIG devices.

Only the worker imports this.
"""

from __future__ import annotations

from collections.abc import Iterator

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.gpm import GpmWindow
from gpulock_exporter.nvml.links import lock_id_of_bus, read_nvlinks
from gpulock_exporter.nvml.lists import SampleList
from gpulock_exporter.nvml.mig import NvmlMigDevices
from gpulock_exporter.nvml.slow_values import SlowCounters
from gpulock_exporter.nvml.utilisation_samples import UtilizationSamples
from gpulock_exporter.telemetry import DeviceTelemetry


class NvmlCard(NvmlDevice):
    """A GPU as NVML's index finds it; raise NVMLError or LostError where it does not answer."""

    def __init__(self, index: int, look: PollContext, sys_root: str) -> None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        super().__init__(handle, lock_id_of_bus(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        self.index = index
        self.uuid = self.query(look, "devices", pynvml.nvmlDeviceGetUUID) or ""
        self.model = self.query(look, "devices", pynvml.nvmlDeviceGetName) or ""
        self.minor = self.query(look, "devices", pynvml.nvmlDeviceGetMinorNumber)
        self.numa = read_numa_node(sys_root, self.name)
        self.links = read_nvlinks(self, look)
        self.instances = NvmlMigDevices()
        self.buffer = SampleList()
        self.samples = UtilizationSamples(look.now)
        self.slow = SlowCounters()
        self.has_gpm = False
        self.window: GpmWindow | None = None
        self.traffic: dict[str, int] = {}  # bytes by GPM, since the card was opened
        self.device = self._blank()

    def begin(self, look: PollContext) -> None:
        """Begin a look: list the MIG devices, with records that say no more than who each is."""
        if not self.uuid:
            self.uuid = self.query(look, "devices", pynvml.nvmlDeviceGetUUID) or ""
        self.device = self._blank()
        if self.instances.look(self, look):
            self.close_window()
            self.has_gpm = False
            self.forget()  # what there is in MIG mode, and out of it, is not the same
        self.device.mig = self.instances.enabled
        for instance in self.instances.all:
            instance.device = DeviceTelemetry(
                bus=self.name,
                uuid=instance.uuid,
                index=self.index,
                minor=self.minor,
                name=instance.model or self.model,
                parent=self.name,
                gi=instance.gi,
                ci=instance.ci,
                profile=instance.profile,
                numa=self.numa,
            )

    def devices(self) -> Iterator[DeviceTelemetry]:
        """Return what this look has found: the card, and its instances."""
        yield self.device
        yield from (instance.device for instance in self.instances.all)

    def close_window(self) -> None:
        """Give the GPM samples back."""
        if self.window is not None:
            self.window.close()
        self.window = None

    def close(self) -> None:
        """Give back all that the card holds."""
        self.close_window()
        self.instances.close()

    def _blank(self) -> DeviceTelemetry:
        return DeviceTelemetry(
            bus=self.name,
            uuid=self.uuid,
            index=self.index,
            minor=self.minor,
            name=self.model,
            numa=self.numa,
            links=self.links,
        )


def read_numa_node(sys_root: str, bus: str) -> int | None:
    """Return the memory node that a card is nearest to, None where the kernel does not know.

    nvmlDeviceGetNumaNodeId is about cards that are such a node themselves.
    """
    try:
        with open(f"{sys_root}/bus/pci/devices/{bus}/numa_node", "rb") as file:
            node = int(file.read(16))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
