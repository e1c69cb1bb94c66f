# SPDX-License-Identifier: Apache-2.0
"""What speaks against a device: by the kernel's log, the exporter's sample, the driver. Pure.

A check that cries wolf is worse than none (docs/facts/nvml.md, what degrades). A width is compared
with what the card had in this boot, or equal neighbours have: many slots are narrow. The number of
NVLinks is compared with what the card had in this boot.

A finding is an event (an XID, an ECC error), whose mark is how many there were in this boot, or a
state (a recovery action, a card that is gone), whose mark says which. The policy remembers the mark
on which it acted, and lowers that of a count that fell. Only another mark is news, also after an
administrator's `restore`.

HARDWARE has the XIDs that speak of the card itself, by NVIDIA's catalogue
(docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog", October 2025):
those whose immediate action is a reset of the GPU, a restart of the machine or a look at its
mechanics, and the two workflows that end so (48, 74). What an application does to itself (13, 31,
43, 45, 68, ...), what needs the application alone to be restarted (94), and what is information
(63, 92, 154) never puts a card out of service. What 154 tells of, a recovery action, does by the
sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from gpulock.daemon.core import sample
from gpulock.daemon.health.cards import NodeCards
from gpulock.errors import one_line
from gpulock.node.device_list import EXCLUDED
from gpulock.node.devices import Device

XID, ECC, MISSING, HEALTH, LOST = "xid", "ecc", "missing", "health", "lost"
POLICY_WORDS: Final = (XID, ECC, MISSING, HEALTH)  # of QUARANTINE_ON
CAUSES: Final = (*POLICY_WORDS, LOST)  # in a note; `missing` asks for those that are lost, too
XID_KEY: Final = "xid "  # and the number
STATE_KEYS: Final = ("recovery", "remap", MISSING, LOST, HEALTH)  # of no event
MEMORY_CHECK: Final = "memory"
MIB: Final = 1 << 20
LEFTOVER_MIB: Final = 256  # that the driver may keep on a free card
LONGEST_REASON: Final = 100  # characters of the exporter's words


class HealthFinding(NamedTuple):
    """Something that speaks against `device` (a lock id), of one of CAUSES."""

    device: str
    cause: str
    key: str
    mark: int
    words: str


def findings_from_sample(
    seen_now: sample.Sample, devices: Collection[Device]
) -> Iterator[HealthFinding]:
    """Yield what a fresh sample says against devices of this node; it names no others.

    A recovery action has the cause `xid`: the driver tells of it by XID 154.
    """
    for name in sorted(quarantinable_ids(devices) & seen_now.devices.keys()):
        seen = seen_now.devices[name]
        if times := seen.uncorrected:
            words = f"{times} uncorrected ECC error{'s' if times > 1 else ''}"
            yield HealthFinding(name, ECC, ECC, times, words)
        if seen.remap_failure:
            yield HealthFinding(name, ECC, "remap", 1, "a row of its memory could not be remapped")
        if seen.recovery_action:
            words = describe_recovery_action(seen.recovery_action)
            yield HealthFinding(name, XID, "recovery", seen.recovery_action, words)
    for bus, why in read_lost_cards(seen_now, devices).items():
        words = f"the driver does not answer for it: {why[:LONGEST_REASON]}"
        yield HealthFinding(bus, LOST, LOST, 1, words)


def find_hardware_xids(cards: NodeCards, devices: Collection[Device]) -> Iterator[HealthFinding]:
    """Yield the XIDs of the card itself that cards of this node had since the driver was loaded."""
    here = quarantinable_ids(devices)
    for (card, number), (times, at) in cards.xids.items():
        if card in here and number in HARDWARE and at >= cards.loaded:
            words = f"XID {number} ({HARDWARE[number]})"
            yield HealthFinding(card, XID, f"{XID_KEY}{number}", times, words)


def find_missing_cards(
    devices: Collection[Device], known: Collection[str]
) -> Iterator[HealthFinding]:
    """Yield the cards `known` in this boot that the driver does not show now, or cannot read."""
    shown = {device.bus: device.fault for device in devices}
    for bus in sorted(known):
        fault = shown.get(bus, "the driver does not show it any more")
        if fault and fault != EXCLUDED:
            yield HealthFinding(bus, MISSING, MISSING, 1, fault)


def read_lost_cards(seen_now: sample.Sample, devices: Collection[Device]) -> dict[str, str]:
    """Return why each card of this node does not answer, by bus id, of those the driver lists."""
    here = {device.bus for device in devices if not device.fault}
    return {bus: one_line(why) for bus, (_, why) in sorted(seen_now.lost.items()) if bus in here}


def check_links(
    seen: sample.DeviceSample, others: Collection[sample.DeviceSample], most: tuple[int, int]
) -> dict[str, str]:
    """Return each check of PCIe and NVLink that could be made, with why it failed, or nothing.

    `others` are the samples of the other cards, `most` the lanes and NVLinks that it had.
    """
    checks: dict[str, str] = {}
    if seen.pcie_width is not None:
        best = seen.pcie_width_max or 0
        equal = [one for one in others if one.pcie_width_max == best and one.pcie_width == best]
        checks["pcie_width"] = ""
        if seen.pcie_width < most[0]:
            checks["pcie_width"] = f"x{seen.pcie_width} on PCIe, and x{most[0]} before in this boot"
        elif seen.pcie_width < best and equal:
            checks["pcie_width"] = f"x{seen.pcie_width} on PCIe, and its neighbours have x{best}"
    if seen.nvlink_active is not None:
        down = f"{seen.nvlink_active} NVLinks are up, and {most[1]} were in this boot"
        checks["nvlink_links"] = down if seen.nvlink_active < most[1] else ""
    return checks


def check_memory(seen: sample.DeviceSample) -> dict[str, str]:
    """Return the check of a free card's memory, none where the kernel keeps pages there, too."""
    if seen.memory_used is None or seen.coherent:
        return {}
    used = seen.memory_used // MIB
    return {MEMORY_CHECK: f"{used} MiB are in use without a process" * (used > LEFTOVER_MIB)}


def describe_recovery_action(number: int) -> str:
    """Return what the driver asks for, as the metrics name it."""
    return f"the driver asks for {ACTIONS.get(number, f'recovery action {number}')}"


def quarantinable_ids(devices: Collection[Device]) -> set[str]:
    """Return the ids that may be quarantined: of devices, and of the cards they are on."""
    return {device.id for device in devices} | {device.bus for device in devices}


def expire_finding_marks(
    marks: Mapping[tuple[str, str], int],
    standing: Collection[HealthFinding],
    sampled: Collection[str],
    here: Collection[str],
) -> dict[tuple[str, str], int]:
    """Return the marks that stay: a state that is over, or a count that fell, will be news.

    A fresh sample names the devices that are `sampled`; what the exporter tells is known of these
    alone. Failed checks are kept, so they are known of all devices that are `here`. The count of an
    XID is root's, and never falls.
    """
    now = {(one.device, one.key): one.mark for one in standing}
    kept: dict[tuple[str, str], int] = {}
    for (name, key), mark in marks.items():
        known = key == MISSING or name in (here if key == HEALTH else sampled)
        seen = now.get((name, key), 0)
        lasts = key.startswith(XID_KEY) or not known or (key in STATE_KEYS and seen)
        if left := mark if lasts else min(mark, seen):
            kept[name, key] = left
    return kept


HARDWARE: Final = {
    46: "GPU stopped processing",
    48: "uncorrectable ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU could not be initialised",
    155: "NVLink error defined by software",
    156: "resource retired",
    158: "GPU timed out for good",
}

ACTIONS: Final = {  # nvmlDeviceGpuRecoveryAction_t of nvml.h 13
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
