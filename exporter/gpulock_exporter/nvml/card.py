# SPDX-License-Identifier: Apache-2.0
"""One card: who it is, its NVLinks, its MIG devices, and what it keeps from look to look.

Only the worker imports this. Of measured values it keeps those that later looks go on from.
"""

from __future__ import annotations

from collections import Counter

import pynvml

from gpulock_exporter.frame import DeviceTelemetry, normalize_bus_id
from gpulock_exporter.nvml.answers import ABSENT, NvmlDevice, PollContext, calls
from gpulock_exporter.nvml.gpm import GpmWindow
from gpulock_exporter.nvml.slow_counters import SlowCounters
from gpulock_exporter.nvml.utilisation_samples import SampleList, UtilizationSamples

ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
NONE_HERE = pynvml.NVML_ERROR_NOT_FOUND  # an index may be free between two that are taken
NO_SUCH = pynvml.NVML_ERROR_INVALID_ARGUMENT
MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of nvml.h 13.3
SWITCH = "switch"
ATS = 2  # NVML_DEVICE_ADDRESSING_MODE_ATS

Records = list[DeviceTelemetry]  # what a look finds: of a card, then of each of its MIG devices


class NvmlCard(NvmlDevice):
    """A GPU as NVML's index finds it; raise NVMLError, ValueError, and as `query` does."""

    def __init__(self, index: int, poll: PollContext, sys_root: str, driver: str) -> None:
        handle = calls.nvmlDeviceGetHandleByIndex(index)
        super().__init__(handle, normalize_bus_id(calls.nvmlDeviceGetPciInfo(handle).busId))
        self.index = index
        self.uuid = self.query(poll, "devices", calls.nvmlDeviceGetUUID) or ""
        self.model = self.query(poll, "devices", calls.nvmlDeviceGetName) or ""
        self.minor = self.query(poll, "devices", calls.nvmlDeviceGetMinorNumber)
        self.numa = read_numa_node(sys_root, self.lock_id)
        self.coherent = self.query(poll, "devices", is_numa_node, is_addressed_by_ats)
        self.links = read_nvlinks(self, poll)
        self.mig: bool | None = None  # None: the card cannot be split
        self.instances: list[NvmlMigDevice] = []
        self._mig_slots = 0  # NVML's indices of MIG devices
        self.buffer = SampleList()
        self.samples = UtilizationSamples(poll.now)
        self.process_memory: int | None = None  # bytes of all that were listed last
        self.slow = SlowCounters(driver)
        self.has_gpm = False
        self.window = GpmWindow(lambda sample: calls.nvmlGpmSampleGet(self.handle, sample))
        self.traffic: dict[str, int] = {}  # bytes by GPM, since the card was opened

    def blank_record(self) -> DeviceTelemetry:
        """Return a record that says no more than which card this is."""
        return DeviceTelemetry(
            bus=self.lock_id,
            uuid=self.uuid,
            index=self.index,
            minor=self.minor,
            name=self.model,
            numa=self.numa,
            coherent=self.coherent,
            links=self.links,
        )

    def begin(self, records: Records, poll: PollContext) -> None:
        """Begin a look, `records` being that of the card: list the MIG devices, and add theirs."""
        if not self.uuid:
            records[0].uuid = self.uuid = self.query(poll, "devices", calls.nvmlDeviceGetUUID) or ""
        before, mode = self.mig, self.query(poll, "mig", calls.nvmlDeviceGetMigMode)
        if mode is not None:
            self.mig = mode[0] == ENABLED
        elif self.is_absent(poll, calls.nvmlDeviceGetMigMode):
            self.mig = None
        if bool(before) != bool(self.mig):
            self.window.close()
            self.has_gpm = False
            self.forget()  # what there is in MIG mode, and out of it, is not the same
            records[0].links = self.links = read_nvlinks(self, poll)  # off in MIG mode
            most = calls.nvmlDeviceGetMaxMigDeviceCount
            self._mig_slots = (self.query(poll, "mig", most) or 0) if self.mig else 0
        self._list_instances(poll)
        records[0].mig = self.mig
        for instance in self.instances:
            record = self.blank_record()
            record.uuid, record.name = instance.uuid, instance.model or self.model
            record.links = None
            record.gi, record.ci, record.profile = instance.gi, instance.ci, instance.profile
            records.append(record)

    def _list_instances(self, poll: PollContext) -> None:
        """List the MIG devices: compute instances of GPU instances; each can be granted.

        They come and go while we look, and NVML reuses their handles (nvml.h,
        nvmlDeviceGetMigDeviceHandleByIndex), so they are told apart by UUID. How busy one is can
        only be told by GPM, and only where it has its GPU instance to itself.
        """
        known = {instance.uuid: instance for instance in self.instances}
        instances: list[NvmlMigDevice] = []  # a card that is lost meanwhile keeps what it had
        for place in range(self._mig_slots):
            try:
                handle = calls.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, place)
                uuid = calls.nvmlDeviceGetUUID(handle)
                instance = known.pop(uuid, None) or NvmlMigDevice(handle, self, uuid)
            except pynvml.NVMLError as fault:
                if fault.value not in (NONE_HERE, NO_SUCH):
                    self.refused(poll, "mig", f"mig {place}", fault.value)
                continue
            except ValueError as fault:  # bytes that are no text
                poll.fail("mig", self.lock_id, fault)
                continue
            instance.handle = handle
            instances.append(instance)
        self.instances = instances
        for gone in known.values():
            gone.window.close()
        sharing = Counter(instance.gi for instance in self.instances)
        for instance in self.instances:
            instance.alone = sharing[instance.gi] == 1

    def close(self) -> None:
        """Give back all that the card holds."""
        for window in (self.window, *(one.window for one in self.instances)):
            window.close()
        self.instances = []


class NvmlMigDevice(NvmlDevice):
    """One MIG device, and the window of its work; raise NVMLError, ValueError."""

    def __init__(self, handle: pynvml.c_nvmlDevice_t, card: NvmlDevice, uuid: str) -> None:
        self.gi = calls.nvmlDeviceGetGpuInstanceId(handle)
        self.ci = calls.nvmlDeviceGetComputeInstanceId(handle)
        super().__init__(handle, f"{card.lock_id}.gi{self.gi}.ci{self.ci}")
        self.uuid = uuid
        self.model, _, self.profile = calls.nvmlDeviceGetName(handle).rpartition(" MIG ")
        self.window = GpmWindow(
            lambda sample: calls.nvmlGpmMigSampleGet(card.handle, self.gi, sample)
        )
        self.alone = True  # in its GPU instance


def read_nvlinks(card: NvmlDevice, poll: PollContext) -> dict[str, int] | None:
    """Return the number of active NVLinks to each card's bus id and to switches.

    None where the card has no NVLink, does not use it (MIG mode), or its state is not known.
    """
    links: Counter[str] = Counter()
    for link in range(MOST_LINKS):
        try:
            if calls.nvmlDeviceGetNvLinkState(card.handle, link):
                peer = _nvlink_peer(card.handle, link)
                if peer:
                    links[peer] += 1
        except pynvml.NVMLError as fault:
            if fault.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                break  # there are no more
            if fault.value in ABSENT and link == 0:
                return None
            if not card.refused(poll, "nvlink", f"link {link}", fault.value):
                return None
        except ValueError as fault:  # bytes that are no text
            poll.fail("nvlink", card.lock_id, fault)
            return None
    return dict(links)


def _nvlink_peer(handle: pynvml.c_nvmlDevice_t, link: int) -> str:
    """Return the bus id of the GPU at the other end, SWITCH, or nothing for another device.

    A driver before 470 does not tell which of them it is: there a bus id, of whatever it is.
    """
    kind = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    if hasattr(pynvml.nvmlLib, "nvmlDeviceGetNvLinkRemoteDeviceType"):
        kind = calls.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        return normalize_bus_id(calls.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    return ""


def is_numa_node(handle: pynvml.c_nvmlDevice_t) -> bool:
    """Return whether a card's memory is a NUMA node (GH200, GB200). Since driver 550."""
    return calls.nvmlDeviceGetNumaNodeId(handle) >= 0


def is_addressed_by_ats(handle: pynvml.c_nvmlDevice_t) -> bool:
    """Return whether processor and card share their page tables. Since driver 580."""
    return calls.nvmlDeviceGetAddressingMode(handle) == ATS


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
