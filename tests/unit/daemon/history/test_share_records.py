# SPDX-License-Identifier: Apache-2.0
"""GPU hours of shares: the records of a card never add up to more than the card's own time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from hypothesis import given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

from gpulock.daemon.core.sample import SAMPLE_LINE, parse_sample
from gpulock.daemon.history.record import ClaimedDevice, ExporterSamples, build_history_record
from tests.support.trees import BOOT, bus, record

DAY = 86400.0
TOKEN = "feed"
ROUNDING = 0.0005  # seconds: half of the last digit of a record
SUMS = ("gpu_seconds", "busy_seconds", "observed_seconds")


class Stay(NamedTuple):
    """A claim on one card: its places of `of` (0: the whole card), and for how many seconds."""

    places: tuple[int, ...]
    of: int
    seconds: float


@st.composite
def stays(draw: st.DrawFn) -> list[Stay]:
    """Return claims of one card of a day: one after the other, shares beside each other."""
    found: list[Stay] = []
    left = DAY
    while left > 1 and len(found) < 12:
        span = draw(st.floats(0.1, left))
        left -= span
        of = draw(st.sampled_from((0, 2, 3, 4, 7, 100)))
        if not of:
            found.append(Stay((), 0, span))
            continue
        free = list(range(1, min(of, 6) + 1))
        while free and (count := draw(st.integers(0, len(free)))):
            places, free = free[:count], free[count:]
            found.append(Stay(tuple(places), of, draw(st.floats(0, span))))
    return found


def share_record(device: str, stay: Stay, **told: float) -> dict[str, Any]:
    """Return the record of a claim of one card, of which the exporter says `told`."""
    names = [f"{device}.share{place}" for place in stay.places] or [device]
    owner = record(token=TOKEN, devices=tuple(names), places=stay.of, claimed_boottime=100.0)
    pairs = " ".join([f"{name}={value}" for name, value in told.items()])
    lines = [f"token {TOKEN} {name} {pairs}" for name in names]
    advice = ExporterSamples("")
    advice.last = parse_sample("\n".join([SAMPLE_LINE, f"boot_id={BOOT}", *lines]), SAMPLE_LINE)
    parts = [ClaimedDevice(name, owner, 1.7e9, held=stay.seconds) for name in names]
    return build_history_record(parts, advice, {}, standing=True)


@settings(max_examples=30)
@given(
    st.lists(stays(), min_size=1, max_size=3),
    st.sampled_from((0.0, 0.5, 1.0, 9.0)),
    st.sampled_from((0.3, 1.0, 9.0)),
)
def test_the_claims_of_a_card_never_have_more_than_its_time(
    cards: list[list[Stay]], work: float, look: float
) -> None:
    of_claims: dict[str, float] = defaultdict(float)
    of_devices: dict[tuple[str, str], float] = defaultdict(float)
    count = 0
    for number, claims in enumerate(cards):
        for stay in claims:
            seen = stay.seconds * look
            made = share_record(bus(number), stay, busy=seen * work, observed=seen)
            count += max(1, len(stay.places))
            for name in SUMS:
                of_claims[name] += made[name] or 0.0
                key = name.replace("gpu_", "held_")
                for one in made["devices"]:
                    of_devices[bus(number), key] += one[key] or 0.0
    assert all(total <= DAY * len(cards) + ROUNDING * count for total in of_claims.values())
    assert all(total <= DAY + ROUNDING * count for total in of_devices.values())


def test_a_place_counts_as_its_part_of_each_second() -> None:
    made = share_record(bus(0), Stay((1, 2), 4, 1000.0), busy=400.0, observed=800.0)
    assert [made[name] for name in SUMS] == [500.0, 200.0, 400.0]
    assert (made["held_seconds"], made["gpus"]) == (1000.0, 1)
    for one in made["devices"]:
        times = one["held_seconds"], one["busy_seconds"], one["observed_seconds"]
        assert times == (250.0, 100.0, 200.0)


def test_the_energy_of_a_card_is_no_shares() -> None:
    made = share_record(bus(0), Stay((1,), 4, 1000.0), energy=5000.0)
    assert (made["energy_joules"], made["devices"][0]["energy_joules"]) == (None, None)


def test_of_a_place_that_nobody_counts_no_time_is_known() -> None:
    made = share_record(bus(0), Stay((1,), 0, 1000.0), busy=400.0, observed=800.0)
    assert [made[name] for name in SUMS] == [None, None, 0.0]
    assert made["held_seconds"] == 1000.0
