# SPDX-License-Identifier: Apache-2.0
"""The complexes that count GPUs, and how many of each a host has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.sge.host_report import REPORTED
from gpulock.install.sge.texts import complex_fault
from gpulock.node.context import Node
from gpulock.node.devices import Device
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


def cluster_complexes(settings: Settings) -> dict[str, str]:
    """Return the line of each complex that jobs and the load sensor need."""
    counted = [
        settings.sge_complexes[0],
        *(one for one, kind in settings.sge_kinds.items() if kind),
    ]
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
