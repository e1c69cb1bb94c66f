# SPDX-License-Identifier: Apache-2.0
"""A report as people read it: at most 80 columns, with and without colour and UTF-8; pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from gpulock.report.advice import advice
from gpulock.report.bars import Charset, bar, energy, memory, over_time, percent, spark
from gpulock.report.claims import Card, Claim
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import counted, duration, moment, short_model

BAR: Final = 20  # columns of a bar
WHOLE: Final = 6  # claims that are told in full; more are a line each
WIDTH: Final = 80
HOUR: Final = 3600.0
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
    Column("BUSY", right=True),
    Column("IDLE", right=True),
    Column("UNSEEN", right=True),
    Column("END"),
)
COLOURS: Final = ((0.15, "red"), (0.5, "yellow"), (1.01, "green"))  # as jobstats has them


def lines(claims: Sequence[Claim], chars: Charset) -> list[str]:
    """Return the report of a job: its claims from the first to the last."""
    found: list[str] = []
    if len(claims) > WHOLE:
        found += table.render(SHORT, [short(claim) for claim in claims], WIDTH)
        found += [table.bold(summary(claims))]
    else:
        for claim in claims:
            found += [*([""] if found else []), *whole(claim, chars)]
        if len(claims) > 1:
            found += ["", table.bold(summary(claims))]
    said = advice_of(claims)
    found += ["", *textwrap.wrap(said, WIDTH)] if said else []
    return [plain(line) for line in found] if chars.full.isascii() else found


def plain(line: str) -> str:
    """Return a line in ASCII; an ellipsis is a sign of its own."""
    return line.replace("…", "~").encode("ascii", "replace").decode()


def last_run(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims of the run that was there last, of each task: one a node.

    What one run holds on several nodes overlaps in time; two runs of a task never do.
    """
    found: list[Claim] = []
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


def advice_of(claims: Sequence[Claim]) -> str:
    """Return the advice for a job, none for an array of which no task stands for the others."""
    last = last_run(claims)
    return advice(last) if len({claim.task_id for claim in last}) == 1 else ""


def whole(claim: Claim, chars: Charset) -> list[str]:
    """Return one claim in full."""
    found = [head(claim), *times(claim), ""]
    rows = [row(card, chars) for card in claim.cards]
    found += table.render(COLUMNS, rows, WIDTH)
    shapes = [(card, *over_time(card.shape, claim.held)) for card in claim.cards]
    drawn = [(card, means, width) for card, means, width in shapes if len(means) > 1]
    if drawn:
        width = drawn[0][2]
        found += ["", f"Over time, {duration(width)} a column; blank: not observed"]
        label = max(3, *(len(card.name) for card, _, _ in drawn))
        found += [
            f"{card.name.rjust(label)}  {spark(means, chars)}".rstrip() for card, means, _ in drawn
        ]
    for card in claim.cards:
        if card.foreign:
            found.append(f"GPU {card.name} had other processes on it for {duration(card.foreign)}")
    if len(claim.cards) > 1:
        found += ["", summary([claim])]
    return found


def head(claim: Claim) -> str:
    """Return who held what where."""
    queue = f" ({claim.queue})" if claim.queue else ""
    name = claim.job if claim.scheduler in ("process", "admin") else f"Job {claim.job}"
    run = f", run {claim.restart + 1}" if claim.restart else ""
    models = {short_model(card.model) for card in claim.cards if card.model}
    model = f", {models.pop()}" if len(models) == 1 else ""
    cards = counted(len(claim.cards), "GPU")
    return table.bold(
        table.clip(f"{name} of {claim.user} on {claim.node}{queue}{run}: {cards}{model}", WIDTH)
    )


def times(claim: Claim) -> list[str]:
    """Return from when to when, and how it ended."""
    held = duration(claim.held) if claim.timed else "for how long is not known"
    if claim.ended is None:
        for_so_far = f"for {held} so far" if claim.timed else held
        return [f"since {moment(claim.begun)}, {for_so_far}"]
    found = [f"{moment(claim.begun)} to {moment(claim.ended)}, {held}"]
    if claim.how not in ("", "epilog"):
        proof = f": {claim.proof}" if claim.proof else ""
        found += textwrap.wrap(f"ended by {claim.how}{proof}", WIDTH)
    return found


def row(card: Card, chars: Charset) -> list[Cell]:
    """Return one device."""
    use = card.utilization
    if use is None:
        drawn, said, idle = "not observed", "", "-"
    else:
        drawn, said = bar(use, BAR, chars), percent(use)
        idle = percent(card.idle / card.held if card.held else None)
    unseen = percent(card.unobserved / card.held if card.held else None)
    colour = next((name for limit, name in COLOURS if use is not None and use < limit), None)
    return [
        Cell(card.name),
        Cell(drawn, colour),
        Cell(said),
        Cell(idle),
        Cell(unseen),
        Cell(memory(card.memory_peak, card.memory)),
        Cell(energy(card.energy)),
    ]


def short(claim: Claim) -> list[Cell]:
    """Return one claim of many."""
    held = sum(card.held for card in claim.cards)
    busy = sum(card.busy or 0.0 for card in claim.cards)
    unseen = sum(card.unobserved for card in claim.cards)
    known = held > unseen
    return [
        Cell(claim.job),
        Cell(claim.node),
        Cell(moment(claim.begun)[:-3]),
        Cell(duration(claim.held) if claim.timed else "-"),
        Cell(str(len(claim.cards))),
        Cell(percent(busy / held) if known else "-"),
        Cell(percent((held - unseen - busy) / held) if known else "-"),
        Cell(percent(unseen / held if held else None)),
        Cell(claim.how if claim.ended is not None else "runs"),
    ]


def summary(claims: Sequence[Claim]) -> str:
    """Return the sum of all devices in a line."""
    cards = [card for claim in claims for card in claim.cards]
    held = sum(card.held for card in cards)
    unseen = sum(card.unobserved for card in cards)
    busy = sum(card.busy or 0.0 for card in cards)
    if held <= 0:
        return "In all: no time" if any(card.timed for card in cards) else "In all: not known"
    if unseen >= held:
        return f"In all: {hours(held)}, not observed"
    idle = held - unseen - busy
    parts = [f"{percent(busy / held)} busy", f"{percent(idle / held)} idle"]
    parts += [f"{percent(unseen / held)} not observed"] if unseen else []
    return f"In all: {hours(held)}, {', '.join(parts)}"


def hours(seconds: float) -> str:
    """Return GPU hours, of a short job GPU seconds."""
    if seconds < HOUR:
        return f"{seconds:.0f} GPU seconds"
    return f"{seconds / HOUR:,.1f} GPU hours"
