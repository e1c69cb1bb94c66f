# SPDX-License-Identifier: Apache-2.0
"""The MIG devices of a card: compute instances of GPU instances, each of which can be granted.

Only the worker imports this. They come and go while we look, and NVML reuses their handles
(nvml.h, nvmlDeviceGetMigDeviceHandleByIndex), so they are listed at each look and told apart by
UUID. What belongs to the board (power, temperature, errors) is nobody's instance's. How busy one
is can only be told by GPM, and only where it has its GPU instance to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.gpm import GpmWindow
from gpulock_exporter.telemetry import DeviceTelemetry

ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
NONE_HERE = pynvml.NVML_ERROR_NOT_FOUND  # an index may be free between two that are taken
NO_SUCH = pynvml.NVML_ERROR_INVALID_ARGUMENT


class NvmlMigDevice(NvmlDevice):
    """One MIG device, with the window on which its work is measured."""

    def __init__(
        self, handle: pynvml.c_nvmlDevice_t, bus: str, uuid: str, place: tuple[int, int], name: str
    ) -> None:
        self.gi, self.ci = place
        super().__init__(handle, f"{bus}.gi{self.gi}.ci{self.ci}")
        self.uuid = uuid
        self.model, _, self.profile = name.rpartition(" MIG ")
        self.window: GpmWindow | None = None
        self.alone = True  # in its GPU instance
        self.device = DeviceTelemetry(bus=bus, uuid=uuid, index=-1)

    def close(self) -> None:
        """Give back what it holds."""
        if self.window is not None:
            self.window.close()
        self.window = None


class NvmlMigDevices:
    """The MIG devices of one card, by UUID."""

    def __init__(self) -> None:
        self.enabled: bool | None = None  # None: the card cannot be split
        self.all: list[NvmlMigDevice] = []
        self._places = 0

    def look(self, card: NvmlDevice, look: PollContext) -> bool:
        """List them; return whether the card has gone into or out of MIG mode."""
        mode = card.query(look, "mig", pynvml.nvmlDeviceGetMigMode)
        before = self.enabled
        if mode is not None:
            self.enabled = mode[0] == ENABLED
        elif card.is_absent(look, pynvml.nvmlDeviceGetMigMode):
            self.enabled = None
        if self.enabled and not before:
            self._places = card.query(look, "mig", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0
        known = {instance.uuid: instance for instance in self.all}
        self.all = self._list(card, look, known) if self.enabled else []
        for gone in known.values():
            gone.close()
        sharing = Counter(instance.gi for instance in self.all)
        for instance in self.all:
            instance.alone = sharing[instance.gi] == 1
        return bool(before) != bool(self.enabled)

    def close(self) -> None:
        """Give back what they hold."""
        for instance in self.all:
            instance.close()
        self.all = []

    def _list(
        self, card: NvmlDevice, look: PollContext, known: dict[str, NvmlMigDevice]
    ) -> list[NvmlMigDevice]:
        """Return those there are, taking what is known out of `known`."""
        found: list[NvmlMigDevice] = []
        for place in range(self._places):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
                instance = known.pop(uuid, None) or identify_mig_device(handle, card.name, uuid)
            except pynvml.NVMLError as fault:
                if fault.value not in (NONE_HERE, NO_SUCH):
                    card.refused(look, "mig", f"mig {place}", fault.value)
                continue
            except ValueError as fault:  # bytes that are no text
                look.fail("mig", card.name, fault)
                continue
            instance.handle = handle
            found.append(instance)
        return found


def identify_mig_device(handle: pynvml.c_nvmlDevice_t, bus: str, uuid: str) -> NvmlMigDevice:
    """Return the MIG device behind a handle; raise NVMLError."""
    gi = pynvml.nvmlDeviceGetGpuInstanceId(handle)
    ci = pynvml.nvmlDeviceGetComputeInstanceId(handle)
    return NvmlMigDevice(handle, bus, uuid, (gi, ci), pynvml.nvmlDeviceGetName(handle))


def mig_gpm_sampler(
    card: NvmlDevice, instance: NvmlMigDevice
) -> Callable[[pynvml.c_nvmlGpmSample_t], object]:
    """Return what takes a GPM sample of the GPU instance that a MIG device is."""
    return lambda sample: pynvml.nvmlGpmMigSampleGet(card.handle, instance.gi, sample)
