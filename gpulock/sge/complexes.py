# SPDX-License-Identifier: Apache-2.0
"""What the complexes of Grid Engine count on a node: devices of a kind, or places on cards.

Hot folder, loaded by the load sensor and gpulockd alone.
"""

from gpulock.node.devices import Device
from gpulock.node.kinds import SHARE_KIND, is_of_kind
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card


def complex_devices(found: list[Device], settings: Settings, name: str) -> list[Device]:
    """Return the devices that a complex counts; of shares the cards."""
    kind = settings.sge_kinds.get(name) or settings.plain_request
    if kind == SHARE_KIND:
        places = count_places_by_card(found, settings.shares)
        return [device for device in found if device.id in places]
    return [device for device in found if is_of_kind(device, kind)]


def count_complex(found: list[Device], settings: Settings, name: str) -> int:
    """Return how many of a complex a node has: devices, of shares the places."""
    if settings.sge_kinds.get(name) != SHARE_KIND:
        return len(complex_devices(found, settings, name))
    return sum(count_places_by_card(found, settings.shares).values())
