# SPDX-License-Identifier: Apache-2.0
"""Which card is joined to which by NVLink, and how cards are called by their place on the bus.

Only the worker imports this.
"""

from __future__ import annotations

from collections import Counter

import pynvml

from gpulock_exporter.nvml.answers import ABSENT, NvmlDevice, PollContext

MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of nvml.h 13.3
SWITCH = "switch"
SHORT_DOMAIN = 4  # digits: the kernel writes more only where it must (pci_name)


def lock_id_of_bus(bus_id: str) -> str:
    """Return a bus id as gpulock writes it: NVML's 00000000:3B:00.0 is 0000:3b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        return f"{int(domain, 16):0{SHORT_DOMAIN}x}:{rest}"
    except ValueError:
        return bus_id.lower()


def read_nvlinks(card: NvmlDevice, look: PollContext) -> dict[str, int] | None:
    """Return the number of active NVLinks to each card's bus id and to switches.

    None where the card has no NVLink, or (in MIG mode) does not use it.
    """
    found: Counter[str] = Counter()
    for link in range(MOST_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(card.handle, link):
                peer = _nvlink_peer(card.handle, link)
                if peer:
                    found[peer] += 1
        except pynvml.NVMLError as fault:
            if fault.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                break  # there are no more
            if fault.value in ABSENT and link == 0:
                return None
            if not card.refused(look, "nvlink", f"link {link}", fault.value):
                return None
    return dict(found)


def _nvlink_peer(handle: pynvml.c_nvmlDevice_t, link: int) -> str:
    """Return the bus id of the GPU at the other end, SWITCH, or nothing for another device."""
    kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        return lock_id_of_bus(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    return ""
