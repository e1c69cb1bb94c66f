# SPDX-License-Identifier: Apache-2.0
"""The checks of `gpulock doctor`: each yields what is wrong, and is silent without what it needs.

A check that finds nothing wrong is passed. What cannot be found out is a warning with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.text.table import UNCUT, wrap_sentence

OK, WARNING, FAULT = "ok", "warning", "fault"
SETTINGS, INSTALLED, DRIVER = "settings", "gpulock", "driver"  # what other checks need
MARKS: Final = {WARNING: "!", FAULT: "x"}
VERSION: Final = 1  # of the JSON document
_FAILURES: Final = (InstallError, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Finding:
    """What a check says (no name: the check's own): a fact where it is well, else what to do."""

    name: str
    state: str
    what: str
    do: str = ""


@dataclass(frozen=True)
class Check:
    """One look; where a check that it `needs` has a fault, or is silent itself, it is silent.

    `do` is what helps where it cannot be made.
    """

    name: str
    find: Callable[[], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    do: str = ""


@dataclass
class Report:
    """What all checks found: facts of what is well, what is wrong, and who said nothing."""

    facts: list[str] = field(default_factory=list[str])
    findings: list[Finding] = field(default_factory=list[Finding])
    passed: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])  # with a fault, or could not be run
    silent: dict[str, str] = field(default_factory=dict[str, str])  # by the check that they need

    @property
    def is_broken(self) -> bool:
        """Say whether there is a fault."""
        return any(one.state == FAULT for one in self.findings)

    def run(self, check: Check) -> None:
        """Run a check, unless one that it needs has failed."""
        if needed := next((one for one in check.needs if one in (*self.failed, *self.silent)), ""):
            self.silent[check.name] = needed
            return
        count = len(self.findings)
        try:
            for one in check.find():  # one by one: what was found before a failure counts
                self._add(check, one)
        except Refusal as refusal:
            self._fail(check, refusal.why, refusal.do)
        except _FAILURES as reason:
            self._fail(check, str(reason), check.do)
        if any(one.state == FAULT for one in self.findings[count:]):
            self.failed.append(check.name)
        elif len(self.findings) == count:
            self.passed.append(check.name)

    def _add(self, check: Check, said: Finding) -> None:
        if said.state == OK:
            self.facts += [said.what] if said.what not in self.facts else []
        else:
            self.findings.append(replace(said, name=said.name or check.name))

    def _fail(self, check: Check, why: str, do: str) -> None:
        self._add(check, warning(f"could not be checked: {why}", do))
        self.failed.append(check.name)


def fact(what: str) -> Finding:
    """Return what an administrator should know of a node that is well."""
    return Finding("", OK, what)


def warning(what: str, do: str = "", name: str = "") -> Finding:
    """Return what a person should look at."""
    return Finding(name, WARNING, what, do)


def fault(what: str, do: str, name: str = "") -> Finding:
    """Return what keeps jobs from their GPUs, or lets them share."""
    return Finding(name, FAULT, what, do)


def run_checks(checks: Iterable[Check]) -> Report:
    """Run checks in their order."""
    report = Report()
    for check in checks:
        report.run(check)
    return report


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
    """Return the JSON document (docs/status-json.md)."""
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
