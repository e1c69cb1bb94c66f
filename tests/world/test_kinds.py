# SPDX-License-Identifier: Apache-2.0
"""Models, MIG instances and places on one node: schedules, and planted faults that they find."""

from __future__ import annotations

import operator

import pytest

from gpulock.alloc import availability, choose
from gpulock.alloc import kinds as kind_choice
from gpulock.alloc.choose import ClaimRequest
from gpulock.node.devices import Device
from gpulock.node.kinds import MIG, is_of_kind
from tests.world.kinds import KIND_CASTS, KIND_POINTS
from tests.world.play import check_each_call, find_planted_fault, sample_schedules
from tests.world.site import Site

PART = 0.15  # of as many as the other schedules, beside them


@pytest.mark.parametrize("name", KIND_CASTS)
def test_random_schedules_of_kinds_keep_every_promise(kind_site: Site, name: str) -> None:
    sample_schedules(kind_site, KIND_CASTS[name], PART / len(KIND_CASTS))


@pytest.mark.parametrize(("name", "actor", "what"), KIND_POINTS)
def test_an_accident_at_any_call_of_kinds_breaks_no_promise(
    kind_site: Site, name: str, actor: str, what: str
) -> None:
    check_each_call(kind_site, KIND_CASTS[name], actor, what, PART / len(KIND_POINTS))


def any_part(device: Device, kind: str) -> bool:
    """Return whether a device is of a kind; an instance is its card."""
    card = Device(device.bus, device.index)
    card.model = device.model
    return is_of_kind(device if kind.startswith(MIG) else card, kind)


def one_group(fit: list[Device]) -> list[list[Device]]:
    """Return cards of all models together."""
    return [fit]


def choose_twice(free: list[Device], want: ClaimRequest, *_: object) -> list[Device]:
    """Choose for each kind of a request by itself."""
    chosen = [
        device
        for kind, count in want.kinds
        for device in [d for d in free if is_of_kind(d, kind)][:count]
    ]
    return [device for device in free if device in chosen]


OVERLAP = (  # an instance or a place leaves its card free
    (choose, "lock_ids_overlap", operator.eq),
    (availability, "SHARE", "no part of a name"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (OVERLAP, "reserve"),
        (OVERLAP, "reserve_of_places"),
        (((kind_choice, "is_of_kind", any_part),), "mig_mode"),
        (((kind_choice, "group_by_model", one_group),), "models"),
        (((kind_choice, "choose_by_kind", choose_twice),), "several_kinds"),
    ],
)
def test_a_planted_fault_of_kinds_is_found(
    kind_site: Site,
    monkeypatch: pytest.MonkeyPatch,
    fault: tuple[tuple[object, str, object], ...],
    name: str,
) -> None:
    for target, of, instead in fault:
        monkeypatch.setattr(target, of, instead)
    # of schedules at random one in 150 finds the first of them
    one, other = ("root", "two") if name == "reserve" else ("", "")
    find_planted_fault(kind_site, KIND_CASTS[name], one=one, other=other)
