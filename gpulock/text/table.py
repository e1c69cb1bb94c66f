# SPDX-License-Identifier: Apache-2.0
"""The one place that lays out tables and lines of label and text; pure but for `width`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TextIO

import click

GAP = "  "
UNCUT = 1 << 10  # columns of what a program reads, not people
NARROW = 80  # columns that a table fits into
SLIM = 40  # columns that a sentence fits into
KEPT = 2  # columns of a table that stay however narrow the screen is
NOTHING = ("", "-")
EARLY = 10  # a column's `drop` from which on it is a luxury
COLOURS = {
    "free": "green",
    "held": "cyan",
    "held_idle": "blue",
    "foreign": "yellow",
    "unknown": "yellow",
    "stale": "yellow",
    "quarantined": "magenta",
    "missing": "red",
}


class Column(NamedTuple):
    """A column: its title, whether it is right-aligned, and how far it may shrink (0: not).

    Where that is not enough, columns with a `drop` are left out, the highest first, those from
    EARLY on before any other shrinks. A `spare` one is left out as well where nothing is known in
    any of its cells.
    """

    title: str
    right: bool = False
    least: int = 0
    drop: int = 0
    spare: bool = False


class Cell(NamedTuple):
    """A cell: its text, its colour, and what at its end stays where it is cut."""

    text: str
    colour: str | None = None
    tail: str = ""


def state_cell(state: str) -> Cell:
    """Return a state as it is shown: `held (idle)` for held_idle."""
    return Cell("held (idle)" if state == "held_idle" else state, COLOURS[state])


def terminal_width(least: int = NARROW, stream: TextIO | None = None) -> int:
    """Return the columns of the terminal, at least `least`; COLUMNS or UNCUT without a terminal.

    The terminal is that of `stream`, of stdout where none is given.
    """
    try:
        columns = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError):
        columns = 0
    columns_set = os.environ.get("COLUMNS", "")
    return max(least, columns or int(columns_set if columns_set.isdecimal() else 0) or UNCUT)


def sentence_width(stream: TextIO) -> int:
    """Return how wide a sentence may be: the terminal's width; UNCUT where a program reads."""
    return terminal_width(SLIM, stream) if stream.isatty() else UNCUT


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int
) -> list[str]:
    """Return the lines of a table no wider than `width` where its columns can shrink so far."""
    widths = fit_columns(columns, rows, width)
    head = format_table_line([Cell(column.title) for column in columns], columns, widths)
    body = [format_table_line(row, columns, widths) for row in rows]
    return [click.style(head, bold=True), *body]


def fit_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int
) -> dict[int, int]:
    """Return how wide each column is that is shown, by number.

    Those that may shrink then do, the widest first. On a narrow screen columns without a `drop` are
    left out as well, from the last on.
    """
    widths = {
        n: max([len(column.title), *(len(row[n].text) for row in rows)])
        for n, column in enumerate(columns)
        if not column.spare or any(row[n].text not in NOTHING for row in rows)
    }
    least = {
        n: min(most, max(columns[n].least, len(columns[n].title))) if columns[n].least else most
        for n, most in widths.items()
    }
    while len(widths) > KEPT:
        last = max(widths, key=lambda n: (columns[n].drop, n if width < NARROW else 0))
        early = columns[last].drop >= EARLY
        needed = total_width(widths if early else {n: least[n] for n in widths})
        if needed <= width or not (columns[last].drop or width < NARROW):
            break
        del widths[last]
    while total_width(widths) > width:
        room, widest = max((widths[n] - least[n], n) for n in widths)
        if not room:
            break
        widths[widest] -= 1
    return widths


def total_width(widths: Mapping[int, int]) -> int:
    """Return how wide a table is."""
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def format_table_line(
    row: Sequence[Cell], columns: Sequence[Column], widths: Mapping[int, int]
) -> str:
    """Return one line: padded first, coloured then, no blanks at its end."""
    parts: list[str] = []
    for n, width in widths.items():
        text = clip_text(row[n].text, width, row[n].tail)
        blanks = " " * (width - len(text))
        painted = paint_text(text, row[n].colour) if text else ""
        parts.append(blanks + painted if columns[n].right else painted + blanks)
    return GAP.join(parts).rstrip()


def clip_text(text: str, width: int, tail: str = "") -> str:
    """Return `text` cut to `width` with an ellipsis, before its `tail` where that fits."""
    if len(text) <= width:
        return text
    kept = tail if len(tail) < width - 1 else ""
    return f"{text[: width - len(kept) - 1]}…{kept}"


def model_cell(model: str, profile: str) -> Cell:
    """Return a device's model, and of a MIG instance its profile, which is not cut off."""
    tail = f" {profile}" if profile else ""
    return Cell(f"{model}{tail}".strip(), tail=tail)


def paint_text(text: str, colour: str | None) -> str:
    """Return the text in a colour; click takes it out again where stdout is no terminal."""
    return click.style(text, fg=colour) if colour else text


def format_state_counts(head: str, counts: Mapping[str, int], width: int) -> list[str]:
    """Return `head: 3 free, 1 held` in lines no longer than `width`; what is 0 is not said."""
    words = [
        paint_text(f"{counts[name]} {state_cell(name).text}", colour)
        for name, colour in COLOURS.items()
        if counts[name] or name == "free"
    ]
    lines = [f"{head}:"]
    for number, word in enumerate(words):
        text = f" {word}{',' if number < len(words) - 1 else ''}"
        if len(click.unstyle(lines[-1] + text)) > width:
            lines.append(" ")
        lines[-1] += text
    return lines


def wrap_sentence(text: str, width: int, indent: str = "", cut: bool = False) -> list[str]:
    """Return a text in lines no longer than `width`, all but the first below `indent`.

    A path or a command's word stays whole, to be copied, unless it may be `cut`; so does a quoted
    path with blanks.
    """
    whole = re.sub("'/[^']*'", lambda path: path[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole, width, subsequent_indent=indent, break_long_words=cut, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def render_facts(pairs: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return indented lines of label and text, long texts wrapped; of an empty pair a blank one."""
    lines: list[str] = []
    indent = max([len(label) for label, _ in pairs], default=0) + 2
    for label, text in pairs:
        first = f"  {click.style(label.ljust(indent), dim=True)}" if label or text else ""
        # a path is copied as a whole, but must fit
        wrapped = wrap_sentence(text, max(20, width - indent - 2), cut=width < NARROW)
        lines.append((first + "".join(wrapped[:1])).rstrip())
        lines += [" " * (indent + 2) + more for more in wrapped[1:]]
    return lines


def percent_cell(ratio: float | None) -> Cell:
    """Return `87%`, `-` where it is not known."""
    return Cell("-" if ratio is None else f"{min(ratio, 1.0):.0%}")
