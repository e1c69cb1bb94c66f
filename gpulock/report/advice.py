# SPDX-License-Identifier: Apache-2.0
"""One plain sentence of advice for a job's owner, where what was seen leaves no doubt; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpulock.report.claims import ReportedClaim, ReportedDevice, sum_times
from gpulock.text.words import format_percent

OBSERVED: Final = 0.9  # share of each device's time that must have been observed
LEAST: Final = 600.0  # seconds: a shorter job is over before it is clear what it does
BLIP: Final = 0.001  # share: a device that was only ever opened works for a moment,
MOMENT: Final = 10.0  # seconds: and for no longer, whatever share of a long job that is
LITTLE: Final = 0.1  # share of the time at work


def advise_job_owner(claims: Sequence[ReportedClaim]) -> str:
    """Return what the owner of a job might do better, or nothing; `claims` are one run's."""
    cards = [(claim, card) for claim in claims for card in claim.cards]
    if not cards or not all(is_well_observed(card) for _, card in cards):
        return ""
    used = [(claim, card) for claim, card in cards if was_device_used(card)]
    never = [(claim, card) for claim, card in cards if not was_device_used(card)]
    if not used:
        who = "The GPU was never" if len(cards) == 1 else "None of the GPUs was ever"
        it = "it" if len(cards) == 1 else "them"
        return f"{who} used: ask for none, or look why the program does not find {it}."
    if never:
        was = "was" if len(never) == 1 else "were"
        names = format_device_names(never, len(claims) > 1)
        return f"{names} {was} never used: ask for {len(used)}."
    return advise_low_use(cards)


def is_well_observed(card: ReportedDevice) -> bool:
    """Return whether nearly all of a device's time was observed, and it was not over at once."""
    return card.times.held >= LEAST and card.times.observed >= OBSERVED * card.times.held


def was_device_used(card: ReportedDevice) -> bool:
    """Return whether a device did more than being opened."""
    return (card.times.utilization or 0.0) > BLIP or card.times.busy > MOMENT


def advise_low_use(cards: Sequence[tuple[ReportedClaim, ReportedDevice]]) -> str:
    """Return the advice to look what the GPUs wait for."""
    share = sum_times(card for _, card in cards).utilization
    if share is None or share > LITTLE:
        return ""
    who = "The GPU" if len(cards) == 1 else "The GPUs"
    return f"{who} worked {format_percent(share)} of the time: look what the program waits for."


def format_device_names(
    cards: Sequence[tuple[ReportedClaim, ReportedDevice]], several: bool
) -> str:
    """Return `GPU 3`, `GPUs 1, 2`, or `GPUs 1, 2 of node1 and GPU 0 of node2`."""
    nodes: dict[str, list[str]] = {}
    for claim, card in cards:
        nodes.setdefault(claim.node, []).append(card.name)
    return " and ".join(
        f"GPU{'s' if names[1:] else ''} {', '.join(names)}{f' of {node}' if several else ''}"
        for node, names in nodes.items()
    )
