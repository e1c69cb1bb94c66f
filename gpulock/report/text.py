# SPDX-License-Identifier: Apache-2.0
"""A report as people read it: at most 80 columns, with and without colour, in ASCII; pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

import click

from gpulock.report.bars import (
    draw_bar,
    draw_sparkline,
    format_energy,
    format_memory_peak,
    resample_use,
)
from gpulock.report.claims import ReportedClaim, ReportedDevice, sum_times
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import (
    format_count,
    format_duration,
    format_local_time,
    format_percent,
    short_model,
)

BAR: Final = 20  # columns of a bar
WHOLE: Final = 6  # claims that are told in full; more are a line each
WIDTH: Final = 80
HOUR: Final = 3600.0
SHARES: Final = tuple(Column(name, right=True) for name in ("BUSY", "IDLE", "UNSEEN"))
COLUMNS: Final = (
    Column("GPU", right=True),
    Column("BUSY", least=5),
    Column("", right=True),
    Column("IDLE", right=True),
    Column("UNSEEN", right=True),
    Column("MEMORY PEAK", right=True),
    Column("ENERGY", right=True),
)
SHORT: Final = (
    Column("JOB", least=8),
    Column("NODE", least=6),
    Column("BEGUN"),
    Column("HELD", right=True),
    Column("GPUS", right=True),
    *SHARES,
    Column("END"),
)
COLOURS: Final = ((0.15, "red"), (0.5, "yellow"), (1.01, "green"))  # as jobstats has them
OBSERVED: Final = 0.9  # share of each device's time that must have been observed
LEAST: Final = 600.0  # seconds: a shorter job is over before it is clear what it does
BLIP: Final = 0.001  # share: a device that was only ever opened works for a moment,
MOMENT: Final = 10.0  # seconds: and for no longer, whatever share of a long job that is
LITTLE: Final = 0.1  # share of the time at work


def format_job_report(claims: Sequence[ReportedClaim]) -> list[str]:
    """Return the report of a job: its claims from the first to the last."""
    found: list[str] = []
    if len(claims) > WHOLE:
        found += table.render_table(SHORT, [short_claim_cells(claim) for claim in claims], WIDTH)
        found += [click.style(format_claims_summary(claims), bold=True)]
    else:
        for claim in claims:
            found += [*([""] if found else []), *format_full_claim(claim)]
        if len(claims) > 1:
            found += ["", click.style(format_claims_summary(claims), bold=True)]
    said = advise_on_last_run(claims)
    found += ["", *textwrap.wrap(said, WIDTH)] if said else []
    return [line.replace("…", "~").encode("ascii", "replace").decode() for line in found]


def select_last_run(claims: Sequence[ReportedClaim]) -> list[ReportedClaim]:
    """Return the claims of the run that was there last, of each task: one a node.

    What one run holds on several nodes overlaps in time; two runs of a task never do.
    """
    found: list[ReportedClaim] = []
    for task in dict.fromkeys(claim.task_id for claim in claims):
        of_task = [claim for claim in claims if claim.task_id == task]
        last = max(of_task, key=lambda claim: claim.begun)
        found += [
            claim
            for claim in of_task
            if claim is last
            or (claim.node != last.node and (claim.ended is None or claim.ended > last.begun))
        ]
    return found


def advise_on_last_run(claims: Sequence[ReportedClaim]) -> str:
    """Return the advice for a job, none for an array of which no task stands for the others."""
    last = select_last_run(claims)
    return advise_job_owner(last) if len({claim.task_id for claim in last}) == 1 else ""


def format_full_claim(claim: ReportedClaim) -> list[str]:
    """Return one claim in full."""
    found = [format_claim_heading(claim), *format_claim_times(claim), ""]
    rows = [report_device_cells(card) for card in claim.cards]
    found += table.render_table(COLUMNS, rows, WIDTH)
    shapes = [(card, *resample_use(card.shape, claim.held)) for card in claim.cards]
    drawn = [(card, means, width) for card, means, width in shapes if len(means) > 1]
    if drawn:
        width = drawn[0][2]
        found += ["", f"Over time, {format_duration(width)} a column; blank: not observed"]
        label = max(3, *(len(card.name) for card, _, _ in drawn))
        found += [
            f"{card.name.rjust(label)}  {draw_sparkline(means)}".rstrip()
            for card, means, _ in drawn
        ]
    for card in claim.cards:
        if card.foreign:
            found.append(
                f"GPU {card.name} had other processes on it for {format_duration(card.foreign)}"
            )
    if len(claim.cards) > 1:
        found += ["", format_claims_summary([claim])]
    return found


def format_claim_heading(claim: ReportedClaim) -> str:
    """Return who held what where."""
    queue = f" ({claim.queue})" if claim.queue else ""
    name = claim.job if claim.scheduler in ("process", "admin") else f"Job {claim.job}"
    run = f", run {claim.restart + 1}" if claim.restart else ""
    models = {short_model(card.model) for card in claim.cards if card.model}
    model = f", {models.pop()}" if len(models) == 1 else ""
    cards = format_count(len(claim.cards), "GPU")
    text = f"{name} of {claim.user} on {claim.node}{queue}{run}: {cards}{model}"
    return click.style(table.clip_text(text, WIDTH), bold=True)


def format_claim_times(claim: ReportedClaim) -> list[str]:
    """Return from when to when, and how it ended."""
    held = format_duration(claim.held) if claim.timed else "for how long is not known"
    if claim.ended is None:
        for_so_far = f"for {held} so far" if claim.timed else held
        return [f"since {format_local_time(claim.begun)}, {for_so_far}"]
    found = [f"{format_local_time(claim.begun)} to {format_local_time(claim.ended)}, {held}"]
    if claim.how not in ("", "epilog"):
        proof = f": {claim.proof}" if claim.proof else ""
        found += textwrap.wrap(f"ended by {claim.how}{proof}", WIDTH)
    return found


def report_device_cells(card: ReportedDevice) -> list[Cell]:
    """Return one device."""
    use, (said, idle, unseen) = card.times.utilization, card.times.shares()
    drawn = draw_bar(card.times.busy / card.times.held, BAR) if use is not None else "not observed"
    colour = next((name for limit, name in COLOURS if use is not None and use < limit), None)
    return [
        Cell(card.name),
        Cell(drawn, colour),
        Cell(said if use is not None else ""),
        Cell(idle),
        Cell(unseen),
        Cell(format_memory_peak(card.memory_peak, card.memory)),
        Cell(format_energy(card.energy)),
    ]


def short_claim_cells(claim: ReportedClaim) -> list[Cell]:
    """Return one claim of many."""
    return [
        Cell(claim.job),
        Cell(claim.node),
        Cell(format_local_time(claim.begun)[:-3]),
        Cell(format_duration(claim.held) if claim.timed else "-"),
        Cell(str(len(claim.cards))),
        *map(Cell, claim.times.shares()),
        Cell(claim.how if claim.ended is not None else "runs"),
    ]


def format_claims_summary(claims: Sequence[ReportedClaim]) -> str:
    """Return the sum of all devices in a line."""
    times = sum_times(card for claim in claims for card in claim.cards)
    if times.held <= 0:
        return "In all: not known"
    hours, (busy, idle, unseen) = format_gpu_hours(times.held), times.shares()
    if times.observed <= 0:
        return f"In all: {hours}, not observed"
    rest = f", {unseen} not observed" if times.unobserved else ""
    return f"In all: {hours}, {busy} busy, {idle} idle{rest}"


def format_gpu_hours(seconds: float) -> str:
    """Return GPU hours, of a short job GPU seconds."""
    if seconds < HOUR:
        return f"{seconds:.0f} GPU seconds"
    return f"{seconds / HOUR:,.1f} GPU hours"


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
