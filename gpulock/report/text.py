# SPDX-License-Identifier: Apache-2.0
"""A report as people read it: at most 80 columns, with and without colour, in ASCII; pure.

A job's output file is read by whatever its owner likes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

import click

from gpulock.daemon.core.sample import MILLI
from gpulock.report.claims import GpuTimes, ReportedClaim, ReportedDevice, sum_times
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import (
    GIB,
    HOUR,
    format_count,
    format_duration,
    format_local_time,
    format_percent,
    short_model,
)

BAR: Final = 20  # columns of a bar
LEVELS: Final = "_.-=+*%#"  # of a line over time, from 0 to 1
WHOLE: Final = 6  # claims that are told in full; more are a line each
WIDTH: Final = 80
KILOWATT_HOUR: Final = 3_600_000.0  # joules
DEVICE_COLUMNS: Final = (
    Column("GPU", right=True),
    Column("BUSY", least=5),
    Column("", right=True),
    Column("IDLE", right=True),
    Column("UNSEEN", right=True),
    Column("MEMORY PEAK", right=True),
    Column("ENERGY", right=True),
)
CLAIM_COLUMNS: Final = (
    Column("ENDED"),
    Column("JOB", least=8),
    Column("USER", least=6),
    Column("GPU", least=8),
    Column("HELD", right=True),
    *[Column(name, right=True) for name in ("BUSY", "IDLE", "UNSEEN")],
    Column("HOW"),
)
COLOURS: Final = ((0.15, "red"), (0.5, "yellow"), (1.01, "green"))  # as jobstats has them
OBSERVED: Final = 0.9  # share of each device's time that must have been observed
LEAST: Final = 600.0  # seconds: a shorter job is over before it is clear what it does
BLIP: Final = 0.001  # share: a device that was only ever opened works for a moment,
MOMENT: Final = 10.0  # seconds: and for no longer, whatever share of a long job that is
LITTLE: Final = 0.1  # share of the time at work


def format_job_report(claims: Sequence[ReportedClaim]) -> list[str]:
    """Return the report of a job: its claims from the first to the last."""
    lines: list[str] = []
    if len(claims) > WHOLE:
        lines += table.render_table(CLAIM_COLUMNS, [claim_cells(claim) for claim in claims], WIDTH)
    else:
        for claim in claims:
            lines += [*([""] if lines else []), *format_full_claim(claim)]
    cards = [card for claim in claims for card in claim.cards]
    if len(cards) > 1:
        lines += ["", click.style(f"In all: {format_gpu_hours(sum_times(cards))}", bold=True)]
    said = advise_on_last_run(claims)
    lines += ["", *textwrap.wrap(said, WIDTH)] if said else []
    return [line.replace("…", "~").encode("ascii", "replace").decode() for line in lines]


def advise_on_last_run(claims: Sequence[ReportedClaim]) -> str:
    """Return the advice for a job, none for an array of which no task stands for the others."""
    if len({claim.owner.task_id for claim in claims}) != 1:
        return ""
    return advise_job_owner(max(claims, key=lambda claim: claim.begun).cards)


def format_full_claim(claim: ReportedClaim) -> list[str]:
    """Return one claim in full."""
    lines = [format_claim_heading(claim), *format_claim_times(claim), ""]
    rows = [report_device_cells(card) for card in claim.cards]
    lines += table.render_table(DEVICE_COLUMNS, rows, WIDTH)
    shapes = {card.name: card.shape for card in claim.cards if card.shape}
    width = max([shape["width"] for shape in shapes.values()], default=0.0)
    # on one scale: a device with a finer one is not drawn
    drawn = {name: shape["use"] for name, shape in shapes.items() if shape["width"] == width}
    if any(len(use) > 1 for use in drawn.values()):
        lines += ["", f"Over time, {format_duration(width)} a column; blank: not observed"]
        label = max([3, *map(len, drawn)])
        drawings = [f"{name.rjust(label)}  {draw_sparkline(use)}" for name, use in drawn.items()]
        lines += [table.clip_text(line.rstrip(), WIDTH) for line in drawings]
    for card in claim.cards:
        if foreign := card.record.get("foreign_seconds"):
            lines.append(
                f"GPU {card.name} had other processes on it for {format_duration(foreign)}"
            )
    return lines


def format_claim_heading(claim: ReportedClaim) -> str:
    """Return who held what where."""
    owner = claim.owner
    queue = f" ({owner.queue})" if owner.queue else ""
    name = owner.job() if owner.scheduler in ("process", "admin") else f"Job {owner.job()}"
    run = f", run {owner.restart + 1}" if owner.restart else ""
    models = {short_model(model) for card in claim.cards if (model := card.record.get("model"))}
    model = f", {models.pop()}" if len(models) == 1 else ""
    cards = format_count(claim.record["gpus"], "GPU")
    text = f"{name} of {owner.user} on {owner.node}{queue}{run}: {cards}{model}"
    return click.style(table.clip_text(text, WIDTH), bold=True)


def format_claim_times(claim: ReportedClaim) -> list[str]:
    """Return from when to when, and how it ended."""
    held = "for how long is not known" if claim.held is None else format_duration(claim.held)
    if claim.ended is None:
        for_so_far = held if claim.held is None else f"for {held} so far"
        return [f"since {format_local_time(claim.begun)}, {for_so_far}"]
    lines = [f"{format_local_time(claim.begun)} to {format_local_time(claim.ended)}, {held}"]
    if claim.how not in ("", "epilog"):
        proof = f": {claim.proof}" if claim.proof else ""
        lines += textwrap.wrap(f"ended by {claim.how}{proof}", WIDTH)
    return lines


def report_device_cells(card: ReportedDevice) -> list[Cell]:
    """Return one device: the bar is of all the time, its colour of what was observed."""
    use, (said, idle, unseen) = card.times.utilization, card.times.shares()
    drawn = draw_bar(card.times.busy / card.times.held) if use is not None else "not observed"
    colour = next((name for limit, name in COLOURS if use is not None and use < limit), None)
    peak, total = card.record.get("memory_peak_bytes"), card.record.get("memory_bytes")
    return [
        Cell(card.name),
        Cell(drawn, colour),
        Cell(said if use is not None else ""),
        Cell(idle),
        Cell(unseen),
        Cell(format_memory_peak(peak, total)),
        Cell(format_energy(card.record.get("energy_joules"))),
    ]


def claim_cells(claim: ReportedClaim) -> list[Cell]:
    """Return one claim of many."""
    return [
        Cell("-" if claim.ended is None else format_local_time(claim.ended)),
        Cell(claim.owner.job()),
        Cell(claim.owner.user),
        Cell(",".join(dict.fromkeys(card.name for card in claim.cards))),
        Cell("-" if claim.held is None else format_duration(claim.held)),
        *map(Cell, sum_times(claim.cards).shares()),
        Cell("runs" if claim.ended is None else claim.how),
    ]


def format_gpu_hours(times: GpuTimes) -> str:
    """Return `0.22 GPU hours held, 0.09 busy, 0.09 idle, 0.04 not observed`.

    What would be 0.00 hours is told in seconds.
    """
    if not times.held:
        return "GPU hours are not known"
    short = times.held < HOUR / 100
    words = [f"{one:.0f}" if short else format_hours(one) for one in (times.held, *times.parts)]
    held, busy, idle, unseen = words
    unit = "seconds" if short else "hours"
    return f"{held} GPU {unit} held, {busy} busy, {idle} idle, {unseen} not observed"


def format_hours(seconds: float) -> str:
    """Return the hours of so many seconds."""
    return f"{seconds / HOUR:,.2f}" if seconds < 100 * HOUR else f"{seconds / HOUR:,.0f}"


def advise_job_owner(cards: Sequence[ReportedDevice]) -> str:
    """Return what the owner of a claim might do better, or nothing.

    Nothing is said unless nearly all of each device's time was observed, or where it was short.
    """
    times = [card.times for card in cards]
    if not cards or any(t.held < LEAST or t.observed < OBSERVED * t.held for t in times):
        return ""
    never = [
        card.name
        for card in cards
        if card.times.busy <= MOMENT and (card.times.utilization or 0.0) <= BLIP
    ]
    if len(never) == len(cards):
        return "No GPU was ever used: ask for none, or look why the program finds none."
    if never:
        return f"Never used: GPU {', '.join(never)}. Ask for {len(cards) - len(never)}."
    share = sum_times(cards).utilization
    if share is None or share > LITTLE:
        return ""
    return f"At work {format_percent(share)} of the time: look what the program waits for."


def draw_bar(share: float) -> str:
    """Return a bar; what is not nothing shows, and what is not everything."""
    full = max(round(min(1.0, share) * BAR), int(share > 0))
    full = min(full, BAR - int(share < 1))
    return "#" * full + "." * (BAR - full)


def draw_sparkline(use: Sequence[int | None]) -> str:
    """Return one character a value, of thousandths; a blank: not known. What is not 0 shows."""
    top = len(LEVELS) - 1
    return "".join(
        " " if one is None else LEVELS[max(int(one > 0), min(top, round(one / MILLI * top)))]
        for one in use
    )


def format_memory_peak(peak: int | None, total: int | None) -> str:
    """Return `12.1 of 80 GiB`, or what of it is known."""
    known = [f"{size / GIB:.3g}" for size in (peak, total or None) if size is not None]
    return "-" if peak is None else f"{' of '.join(known)} GiB"


def format_energy(joules: float | None) -> str:
    """Return `1.234 kWh`."""
    return "-" if joules is None else f"{joules / KILOWATT_HOUR:.3f} kWh"
