# SPDX-License-Identifier: Apache-2.0
"""The complexes that count GPUs of one kind: offered, made, and given their amount on a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.hooks import InstallError
from gpulock.install.sge.host_report import REPORTED
from gpulock.install.sge.texts import complex_fault
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.kinds import MODEL, SHARE_KIND, count_device_kinds
from gpulock.node.settings import Settings
from gpulock.sge.complexes import count_complex

# complex(5) from the type on: type relop requestable consumable default urgency
CONSUMABLE: Final = "INT <= YES YES 0 0"
_LOAD_VALUE: Final = "INT <= YES NO 0 0"


def read_node_devices(settings: Settings) -> list[Device]:
    """Return the devices of this node, none where no driver is loaded."""
    try:
        return Node(settings).devices()
    except Refusal:
        return []


def cluster_complexes(settings: Settings, name: str) -> dict[str, str]:
    """Return the line of each complex that jobs and the load sensor need: of `name`, of kinds."""
    counted = [name, *(one for one, kind in settings.sge_kinds.items() if kind)]
    lines = {one: f"{one} {one} {CONSUMABLE}" for one in counted}
    return lines | {one: f"{one} {one} {_LOAD_VALUE}" for one in REPORTED}


def check_complexes(table: Mapping[str, str], lines: Mapping[str, str]) -> None:
    """Raise InstallError for a complex that is there and cannot count GPUs; pure."""
    for name in lines:
        if name in table and name not in REPORTED and (fault := complex_fault(table[name])):
            raise InstallError(f"complex {name}: {fault}; correct it by qconf -mc")


def plain_amount(settings: Settings, name: str, gpus: int) -> int:
    """Return how many GPUs a complex counts: `gpus`, of a node with MIG those of its kind."""
    found = read_node_devices(settings)
    split = any(device.parent for device in found)
    return count_complex(found, settings, name) if split or settings.sge_kinds.get(name) else gpus


def offered_complexes(found: list[Device], settings: Settings) -> list[str]:
    """Return words for SGE_COMPLEXES that a node of several kinds, or of shares, still lacks.

    Two models of one first word have their whole names.
    """
    kinds = {kind for kind in settings.sge_kinds.values() if kind}
    known = [kind for kind in count_device_kinds(found) if not kind.endswith("?")]
    words: list[str] = []
    if len(known) > 1 and not kinds - {SHARE_KIND}:
        short = Counter(complex_name(kind) for kind in known)
        for kind in known:
            name = complex_name(kind)
            words.append(f"{name if short[name] == 1 else 'gpu_' + kind[len(MODEL) :]}={kind}")
    if settings.shares and SHARE_KIND not in kinds:
        words.append(f"gpu_share={SHARE_KIND}")
    return words


def complex_name(kind: str) -> str:
    """Return a name for the complex of a kind: `gpu_a100` of a model, `mig_3g.40gb`."""
    start, _, name = kind.partition(":")
    return f"gpu_{name.partition('-')[0]}" if f"{start}:" == MODEL else f"{start}_{name}"


def sensor_difference(settings: Settings, loads: Mapping[str, str]) -> str:
    """Return in which complex the load sensor's values do not fit the node, or nothing.

    `loads` are the values that qmaster has. Fewer than the node has are those in use.
    """
    for name in settings.sge_complexes:
        there = plain_amount(settings, name, settings.expected_gpus)
        told = loads.get(name)
        if told is None:
            return f"it reports no {name}, which SGE_COMPLEXES has"
        if there and float(told) > there:
            return f"it reports {name}={float(told):g}, this node has {there}"
    return ""
