# SPDX-License-Identifier: Apache-2.0
"""Requests by kind: may the node ever grant one, and which of the free devices does it get.

Hot, loaded where a kind is asked for or the node has devices of several kinds: on a node of one
model a plain request never comes here.
"""

from gpulock.alloc.choose import choose_devices
from gpulock.errors import BROKEN, INVALID_REQUEST, UNKNOWN, Refusal, format_requested_gpus
from gpulock.node.context import Node
from gpulock.node.device_list import has_untold_instances
from gpulock.node.devices import Device
from gpulock.node.kinds import (
    ANY,
    CARD,
    MIG,
    MIXED,
    MODEL,
    format_device_kinds,
    is_of_kind,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.choose import ClaimRequest

Links = dict[tuple[str, str], int]


def resolve_kinds(node: Node, devices: list[Device], want: "ClaimRequest") -> None:
    """Say in `want.kinds` what a request means here; raise Refusal for what cannot be.

    With PLAIN_REQUEST=any a plain request stays plain.
    """
    plain = node.settings.plain_request
    if not want.kinds and plain == ANY:
        return
    asked = want.kinds or (("", want.count),)
    want.kinds = tuple([(kind or plain, n) for kind, n in asked])
    cards = len({device.bus for device in devices})
    for kind, count in want.kinds:
        check_kind_possible(node, devices, kind, count, node.settings.expected_gpus - cards)
    if not choose_by_kind([d for d in devices if not d.fault], want, {}, {}):
        raise unmatched_kind_refusal(node, devices, format_requested_kinds(want))


def check_kind_possible(
    node: Node, devices: list[Device], kind: str, count: int, gone: int
) -> None:
    """Raise Refusal for more of a kind than the node has, or than work.

    A card that is gone, or whose model cannot be read, may be of a model that is here.
    """
    fit = [device for device in devices if is_of_kind(device, kind)]
    works = largest_count(kind, [device for device in fit if not device.fault])
    if 0 < count <= works:
        return
    asked = format_requested_kind(kind, count)
    unread = [device for device in devices if device.fault and not device.model]
    there = largest_count(kind, [device for device in fit if device not in unread])
    if there or not kind.startswith(MODEL):
        there += len(unread) + max(gone, 0)
    if 0 < count <= there and not kind.startswith(MIG):
        raise Refusal(
            BROKEN, f"{asked}, {works} of {there} work", "see gpulock status for the missing card"
        )
    if kind.startswith(MIG) and has_untold_instances(node.settings.driver_root, devices):
        why = f"{asked}: no exporter tells the profiles of this node's instances"
        raise Refusal(UNKNOWN, why, "see gpulock inventory")
    raise unmatched_kind_refusal(node, devices, asked if fit else kind.replace(":", " "))


def unmatched_kind_refusal(node: Node, devices: list[Device], asked: str) -> Refusal:
    """Return the refusal of what the node does not have, with what it has."""
    there = format_device_kinds(devices, node.settings.shares)
    return Refusal(INVALID_REQUEST, f"{asked}: this node has {there}", "ask for these")


def largest_count(kind: str, fit: list[Device]) -> int:
    """Return how many devices one request of a kind could get of these."""
    groups = group_by_model(fit)
    if kind == CARD:
        return max([len(group) for group in groups], default=0)
    return len(fit)


def group_by_model(fit: list[Device]) -> list[list[Device]]:
    """Return the devices by model and profile, in the order of the node."""
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in fit:
        groups.setdefault((device.model, device.profile), []).append(device)
    return list(groups.values())


def choose_by_kind(
    free: list[Device], want: "ClaimRequest", last: dict[str, int], links: Links
) -> list[Device]:
    """Return the devices for every kind of a request, in their order; nothing if one is short.

    The kind that fewest devices fit chooses first.
    """
    fits = [(kind, count, [d for d in free if is_of_kind(d, kind)]) for kind, count in want.kinds]
    chosen: list[Device] = []
    for kind, count, fit in sorted(fits, key=lambda one: len(one[2])):
        left = [device for device in fit if device not in chosen]
        of_kind = choose_one_kind(left, kind, count, last, links)
        if not of_kind:
            return []
        chosen += of_kind
    return [device for device in free if device in chosen]


def choose_one_kind(
    fit: list[Device], kind: str, count: int, last: dict[str, int], links: Links
) -> list[Device]:
    """Return `count` of these devices: of one model if they can be, the best that are free.

    Of several models that with the fewest free is taken, so that larger requests find room.
    """

    def cost(group: list[Device]) -> tuple[list[int], int, int]:
        late = sorted([last.get(device.id, 0) for device in group])
        return late[count - 1 :: -1], late.count(0), len(group)

    groups = [group for group in group_by_model(fit) if len(group) >= count]
    if not groups and kind == CARD:
        return []
    return choose_devices(min(groups, key=cost) if groups else fit, count, links, last)


def format_requested_kinds(want: "ClaimRequest") -> str:
    """Return what is asked for, in words."""
    return " and ".join([format_requested_kind(kind, count) for kind, count in want.kinds])


def format_requested_kind(kind: str, count: int) -> str:
    """Return how many of a kind are asked for, in words."""
    if kind == CARD:
        return format_requested_gpus(count) + (", all of one model" if count > 1 else "")
    if kind in (MIXED, ANY):
        return format_requested_gpus(count)
    return f"{count} of {kind.replace(':', ' ')} asked for"
