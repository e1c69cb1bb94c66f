# SPDX-License-Identifier: Apache-2.0
"""click's runner of commands, which keeps stderr apart (click 8.1 must be told to); tables."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner

_APART: dict[str, Any] = (
    {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
)


def command_runner() -> CliRunner:
    """Return a runner whose results have stdout and stderr of their own."""
    return CliRunner(**_APART)


def read_table(text: str, title: str) -> dict[str, dict[str, str]]:
    """Return the table whose first column is `title`, by row and title."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.split()[:1] == [title])
    head = lines[at].split()
    found: dict[str, dict[str, str]] = {}
    for line in lines[at + 1 :]:
        words = line.split("  ")
        cells = [word.strip() for word in words if word.strip()]
        if not cells or len(cells) < 3:
            break
        found[cells[0]] = dict(zip(head[1:], cells[1:]))
    return found


def read_facts(text: str) -> dict[str, str]:
    """Return the labelled lines of an answer, each in one piece; of one label the last."""
    found: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        label, gap, rest = line.strip().partition("  ")
        if line.startswith("   ") and last:
            found[last] += f" {line.strip()}"
        elif line.startswith("  ") and gap:
            last = label
            found[label] = rest.strip()
    return found
