# SPDX-License-Identifier: Apache-2.0
"""Models, MIG instances and places on one node: schedules, and planted faults that they find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulock.alloc import availability, holders
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


def instance_leaves_its_card_free(patch: pytest.MonkeyPatch) -> None:
    """The lock of an instance keeps nobody from its card, nor the other way round."""

    def same(a: str, b: str) -> bool:
        return a == b

    patch.setattr(holders, "lock_ids_overlap", same)
    patch.setattr(availability, "SHARE", "no part of a name")


def instance_is_a_card(patch: pytest.MonkeyPatch) -> None:
    """A request by model may get an instance of such a card."""

    def any_part(device: Device, kind: str) -> bool:
        card = Device(device.bus, device.index)
        card.model = device.model
        return is_of_kind(device if kind.startswith(MIG) else card, kind)

    patch.setattr(kind_choice, "is_of_kind", any_part)


def models_are_mixed(patch: pytest.MonkeyPatch) -> None:
    """A plain request gets cards of two models."""

    def one_group(fit: list[Device]) -> list[list[Device]]:
        return [fit]

    patch.setattr(kind_choice, "group_by_model", one_group)


def one_kind_is_chosen_twice(patch: pytest.MonkeyPatch) -> None:
    """A device serves two kinds of a request."""

    def choose(free: list[Device], want: ClaimRequest, links: object) -> list[Device]:
        del links
        chosen = [
            device
            for kind, count in want.kinds
            for device in [d for d in free if is_of_kind(d, kind)][:count]
        ]
        return [device for device in free if device in chosen]

    patch.setattr(kind_choice, "choose_by_kind", choose)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], str], ...] = (
    (instance_leaves_its_card_free, "reset"),
    (instance_leaves_its_card_free, "reset_of_places"),
    (instance_is_a_card, "mig_mode"),
    (models_are_mixed, "models"),
    (one_kind_is_chosen_twice, "several_kinds"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), MUTANTS, ids=[f"{p.__name__}-{n}" for p, n in MUTANTS])
def test_a_planted_fault_of_kinds_is_found(
    kind_site: Site,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
) -> None:
    plant(monkeypatch)
    # of schedules at random one in 150 finds the first of them
    one, other = ("root", "two") if name == "reset" else ("", "")
    find_planted_fault(kind_site, KIND_CASTS[name], one=one, other=other)
