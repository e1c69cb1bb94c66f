# SPDX-License-Identifier: Apache-2.0
"""The record of a check in docs/hardware/: what agreed and what did not, and the raw answers.

A page for people, `DATE-MODEL.md`, and beside it a folder of that name with what was said word
for word: serial numbers, UUIDs and the host's name are taken out of all of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu.compare import Finding, Line
from tests.gpu.rules import OURS_ALONE

_SERIALS = re.compile(r"(<(?:serial|board_id|chassis_serial_number)>)[^<]*(</)")
_SLUG = re.compile(r"[^a-z0-9]+")


class About(NamedTuple):
    """What was checked, and how."""

    date: str  # 2026-11-21
    model: str
    driver: str
    cards: int
    kernel: str
    seconds: float
    rounds: int
    load: str
    remarks: Sequence[str]


def stem(about: About) -> str:
    """Return the name of the record."""
    return f"{about.date}-{_SLUG.sub('-', about.model.lower()).strip('-')}-{about.driver}"


def page(about: About, lines: Sequence[Line], uuids: Sequence[str]) -> str:
    """Return the page; a card is called by its place in `uuids`."""
    counted = Counter(line.finding for line in lines)
    differed = [line for line in lines if line.finding is Finding.DIFFERED]
    result = "differs" if differed else "agrees with nvidia-smi"
    head = [
        f"# {about.model}, driver {about.driver}: {result}",
        "",
        f"{about.date}. {about.cards} card(s), kernel {about.kernel}; {about.rounds} rounds in "
        f"{about.seconds:.0f} s; load: {about.load}.",
        ", ".join(f"{counted[finding]} {finding.value}" for finding in Finding) + ".",
        *(f"- {remark}" for remark in about.remarks),
        "",
    ]
    body = [
        *table("What differed", differed, uuids),
        *table("What agreed", [x for x in lines if x.finding is Finding.AGREED], uuids),
        *table("What was not compared", [x for x in lines if x.finding is Finding.UNASKED], uuids),
    ]
    neither = sorted({line.metric for line in lines if line.finding is Finding.NEITHER})
    alone = [f"- `{name}`: {why}" for name, why in OURS_ALONE.items()]
    tail = [
        *(["## What neither has", "", f"`{'`, `'.join(neither)}`", ""] if neither else []),
        *("## What nvidia-smi cannot be asked for", "", *alone, ""),
        f"Raw answers: `{stem(about)}/`, UUIDs and serial numbers taken out.",
    ]
    return "\n".join([*head, *body, *tail]) + "\n"


def table(title: str, lines: Sequence[Line], uuids: Sequence[str]) -> list[str]:
    """Return a table, nothing where it would be empty."""
    if not lines:
        return []
    rows = [
        f"| {place(line.uuid, uuids)} | `{line.metric}` | {cell(line.words)} | {cell(line.why)} |"
        for line in lines
    ]
    return [
        f"## {title}",
        "",
        "| card | metric | | why not closer |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def place(uuid: str, uuids: Sequence[str]) -> str:
    """Return the number of a card."""
    return str(uuids.index(uuid)) if uuid in uuids else "?"


def cell(text: str) -> str:
    """Return text that cannot end a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def masked(text: str, uuids: Iterable[str], names: Iterable[str]) -> str:
    """Return text without serial numbers, UUIDs and `names`, each card still told from others."""
    text = _SERIALS.sub(r"\g<1>0\g<2>", text)
    for number, uuid in enumerate(uuids):
        text = text.replace(uuid, f"GPU-00000000-0000-0000-0000-{number:012d}")
    for name in names:
        if name:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", "node", text)
    return text


def write(
    folder: Path, about: About, lines: Sequence[Line], uuids: Sequence[str], raw: Mapping[str, str]
) -> Path:
    """Write the page and the raw answers by the names of their files; return the page's path."""
    name = stem(about)
    beside = folder / name
    beside.mkdir(parents=True, exist_ok=True)
    for file, text in raw.items():
        (beside / file).write_text(text)
    found = folder / f"{name}.md"
    found.write_text(masked(page(about, lines, uuids), uuids, ()))
    return found
