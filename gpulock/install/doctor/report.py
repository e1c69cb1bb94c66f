# SPDX-License-Identifier: Apache-2.0
"""What `gpulock doctor` prints: a line for each cause and below it what to do, or one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from gpulock.install.doctor.check import FAULT, WARNING, Report
from gpulock.text.table import UNCUT, wrap_sentence

MARKS: Final = {WARNING: "!", FAULT: "x"}
VERSION: Final = 1  # of the JSON document


def report_lines(report: Report, with_all: bool, width: int = UNCUT) -> Iterator[str]:
    """Yield the lines for people; `with_all` names each check that is well or silent, too."""
    for one in report.findings:
        end = "" if one.what.endswith((".", "?")) else "."
        yield from wrap_sentence(f"{MARKS[one.state]} {one.name}: {one.what}{end}", width, "  ")
        yield from (f"    {line}" for line in wrap_sentence(one.do, width - 4))
    if with_all:
        yield from (f"ok {name}" for name in report.passed)
        yield from (f"- {name}: not looked at without {n}" for name, n in report.silent.items())
    if not report.findings:
        number = f"{len(report.passed)} checks{'' if with_all else '; --all'}"
        yield from wrap_sentence(f"ok: {', '.join(report.facts)} ({number})", width, "  ")


def report_json(report: Report) -> str:
    """Return the JSON document (docs/troubleshooting.md)."""
    findings = [
        {"check": one.name, "state": one.state, "what": one.what, "do": one.do}
        for one in report.findings
    ]
    document = {
        "version": VERSION,
        "broken": report.is_broken,
        "facts": report.facts,
        "findings": findings,
        "passed": report.passed,
        "silent": report.silent,
    }
    return json.dumps(document, indent=2)
