# SPDX-License-Identifier: Apache-2.0
"""Plugin of the labs' tests: what a failure leaves, and the one retry, which a ledger counts.

A test is run again where a wait of it gave up, never after an assertion: one test of a commit in a
day, whatever processes run its tests. The line that this adds to the ledger is to be committed. A
test that has two lines is not run again: its third makes the run red: mend its cause.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from _pytest.runner import runtestprotocol

from tests.support import evidence
from tests.support.wait import GaveUp

ROOT: Final = Path(__file__).resolve().parents[2]
LEDGER: Final = ROOT / "tests/ledger.tsv"  # date, commit, target, test, what it waited for
FAILED: Final = ROOT / "build/failed"
MOST: Final = 2  # lines of one test with which it may still be run again
_GAVE_UP: Final = pytest.StashKey[str]()  # a test's first failure: the wait that gave up, or ""
_KEPT: Final = pytest.StashKey[bool]()  # whether a failed test has left a folder
_AGAIN: Final = "ran again"  # a property of the reports of a test that did, with the wait


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what the labs say where a test has failed, and note a wait that gave up."""
    report = yield
    if report.failed and call.excinfo is not None:
        folder = FAILED / re.sub(r"[^\w.\[\]-]+", "-", item.nodeid.rpartition("labs/")[2])
        if _KEPT not in item.stash:  # as it is before a fixture repairs it
            item.stash[_KEPT] = evidence.keep(folder)
        if item.stash[_KEPT]:
            report.sections.append(
                ("logs, locks and jobs", f"kept in {os.path.relpath(folder, ROOT)}")
            )
        error = call.excinfo.value  # the first counts: a fixture often waits for what a test left
        waited = str(error).partition("\n")[0] if isinstance(error, GaveUp) else ""
        item.stash.setdefault(_GAVE_UP, waited)
    return report


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a lab's test, and a second time where its failure was a wait that gave up."""
    if item.get_closest_marker("lab") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    waited = item.stash.get(_GAVE_UP, "")
    if waited and may_run_again(LEDGER, item.nodeid, waited):
        item.user_properties.append((_AGAIN, waited))
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly which test was run again."""
    stats: dict[str, list[object]] = terminalreporter.stats
    reports = [one for each in stats.values() for one in each if isinstance(one, pytest.TestReport)]
    told = {one.nodeid: dict(one.user_properties).get(_AGAIN) for one in reports}
    for test, waited in told.items():
        if waited:
            terminalreporter.section("RUN AGAIN: a wait gave up", red=True, bold=True)
            terminalreporter.write_line(f"{test}\n  {waited}")
            terminalreporter.write_line("  its line in tests/ledger.tsv is to be committed")


def may_run_again(ledger: Path, test: str, waited: str) -> bool:
    """Add a wait that gave up to the ledger; say whether its test may be run again."""
    with ledger.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the labs of one run write at the same time
        file.seek(0)
        rows = [line.split("\t") for line in file.read().splitlines()]
        day, commit = datetime.date.today().isoformat(), _commit()
        again = all(row[:2] != [day, commit] for row in rows) and lines_of(rows, test) < MOST
        target = os.environ.get("GPULOCK_TARGET", "pytest")
        file.write("\t".join([day, commit, target, test, " ".join(waited.split())]) + "\n")
    return again


def lines_of(rows: list[list[str]], test: str) -> int:
    """Return how many lines a ledger has of a test."""
    return sum(row[3:4] == [test] for row in rows)


def _commit() -> str:
    """Return the commit of this checkout, whoever it belongs to."""
    line = ["git", "-c", "safe.directory=*", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
