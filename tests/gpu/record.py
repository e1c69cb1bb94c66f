# SPDX-License-Identifier: Apache-2.0
"""The record of a check in docs/hardware/: a page for people, and beside it the raw answers.

Serial numbers, UUIDs and the host's name are taken out of all of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu.compare import Finding, Line
from tests.gpu.rules import OURS_ALONE

_SERIALS = re.compile(r"(<(?:serial|board_id|chassis_serial_number)>)[^<]*(</)")
_MIG_UUID = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SLUG = re.compile(r"[^a-z0-9]+")


class About(NamedTuple):
    """What was checked, and how; a card is called by its place in `uuids`."""

    date: str  # 2026-11-21
    model: str
    driver: str
    how: str
    uuids: Sequence[str]
    host: str

    @property
    def stem(self) -> str:
        """Return the name of the record."""
        return f"{self.date}-{_SLUG.sub('-', self.model.lower()).strip('-')}-{self.driver}"


def page(about: About, lines: Sequence[Line], remarks: Sequence[str]) -> str:
    """Return the page."""
    kinds = {kind: [line for line in lines if line.finding is kind] for kind in Finding}
    result = "differs" if kinds[Finding.DIFFERED] else "agrees with nvidia-smi"
    neither = sorted({line.metric for line in kinds[Finding.NEITHER]})
    counts = Counter(line.finding for line in lines)
    parts = [
        f"# {about.model}, driver {about.driver}: {result}\n",
        f"{about.date}. {about.how}",
        ", ".join(f"{counts[kind]} {kind.value}" for kind in Finding) + ".",
        *(f"- {remark}" for remark in remarks),
        "",
        *table("What differed", kinds[Finding.DIFFERED], about.uuids),
        *table("What agreed", kinds[Finding.AGREED], about.uuids),
        *table("What was not compared", kinds[Finding.UNASKED], about.uuids),
        *(["## What neither has\n", f"`{'`, `'.join(neither)}`\n"] if neither else []),
        "## What nvidia-smi cannot be asked for\n",
        *(f"- `{name}`: {why}" for name, why in OURS_ALONE.items()),
        f"\nRaw answers: `{about.stem}/`, UUIDs and serial numbers taken out.\n",
    ]
    return "\n".join(parts)


def table(title: str, lines: Sequence[Line], uuids: Sequence[str]) -> list[str]:
    """Return a table, nothing where it would be empty."""
    rows = [
        f"| {place(line.uuid, uuids)} | `{line.metric}` | {cell(line.words)} | {cell(line.why)} |"
        for line in lines
    ]
    head = [f"## {title}\n", "| card | metric | | why not closer |", "|---|---|---|---|"]
    return [*head, *rows, ""] if rows else []


def place(uuid: str, uuids: Sequence[str]) -> str:
    """Return the number of a card."""
    return str(uuids.index(uuid)) if uuid in uuids else "?"


def cell(text: str) -> str:
    """Return text that cannot end a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def masked(text: str, about: About) -> str:
    """Return text that names no machine, each card still told from others."""
    text = _SERIALS.sub(r"\g<1>0\g<2>", text)
    for number, uuid in enumerate([*about.uuids, *sorted(set(_MIG_UUID.findall(text)))]):
        text = text.replace(uuid, f"{uuid[:4]}00000000-0000-0000-0000-{number:012d}")
    return re.sub(rf"(?<![\w.-]){re.escape(about.host)}(?![\w.-])", "node", text)


def write(folder: Path, about: About, text: str, raw: Mapping[str, str]) -> Path:
    """Write the page and the raw answers by the names of their files; return the page's path."""
    beside = folder / about.stem
    beside.mkdir(parents=True, exist_ok=True)
    for file, answer in raw.items():
        (beside / file).write_text(masked(answer, about))
    written = folder / f"{about.stem}.md"
    written.write_text(masked(text, about))
    return written
