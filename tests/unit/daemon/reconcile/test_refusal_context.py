# SPDX-License-Identifier: Apache-2.0
"""What a hook refused stands where the user looks, and no scheduler holds up gpulockd for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile import refusal_context
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.refusal_context import (
    LENGTH,
    MOST_REFUSALS,
    RECENT,
    RefusalNotifier,
    format_context_value,
)
from gpulock.deadline import clock_boottime
from gpulock.store.events import REFUSED, note_event
from tests.support.faults import raising
from tests.support.journal import HeardJournal
from tests.support.trees import Box

WHY = "gpulock: job 12: busy: 2 GPUs asked for, 1 of 4 free; the job can run when others have ended"


class Site:
    """A node of Grid Engine with a qalter that writes down what it is told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told = root / "told"
        self.gate = root / "gate"
        self.box = Box(root / "node", SGE_ROOT="/opt/sge", SGE_BINARIES=str(root))
        self.box.lock.mkdir()
        self.qalter(0)
        self.journal = HeardJournal()
        self.chore = RefusalNotifier(self.journal)

    def qalter(self, code: int) -> None:
        lines = [
            "#!/bin/sh",
            f"test -e {self.gate} && cat {self.gate}",
            f'printf "%s\\n" "$*" >> {self.told}',
            f"exit {code}",
        ]
        (self.root / "qalter").write_text("\n".join(lines) + "\n")
        (self.root / "qalter").chmod(0o755)

    def keep(self, job: str, text: str = WHY) -> None:
        note_event(str(self.box.lock), REFUSED, job, text)

    def go(self) -> None:
        self.chore.run(self.box.node(), ReconcileReport([], []), 0.0)

    def done(self) -> list[str]:
        """Wait until it was told; return what qalter was called with."""
        assert self.chore.asking is not None
        assert self.chore.asking.wait(20.0)
        lines = self.told.read_text().splitlines()
        self.go()  # which may start the next ones
        return lines

    def said(self) -> str:
        return "\n".join(self.journal.said())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_after_an_exception_nobody_foresaw_the_next_refusals_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.keep("11")
    with monkeypatch.context() as patch:
        fault = raising(RuntimeError("can't start new thread"))
        patch.setattr(refusal_context, "set_job_contexts", fault)
        site.go()
        assert site.chore.asking is not None and site.chore.asking.wait(20.0)
        with pytest.raises(RuntimeError):
            site.go()
    site.keep("12")
    site.go()
    assert len(site.done()) == 1


def test_a_refusal_is_put_into_the_jobs_context(site: Site) -> None:
    site.keep("12")
    site.go()
    (line,) = site.done()
    assert line == f"-ac gpulock={WHY.replace(',', ';')} 12"


def test_the_last_refusal_of_a_job_counts(site: Site) -> None:
    site.keep("12", "first")
    site.keep("12", "second")
    site.go()
    assert site.done() == ["-ac gpulock=second 12"]


@pytest.mark.real_time
def test_a_qmaster_that_does_not_answer_holds_up_nobody(site: Site) -> None:
    os.mkfifo(site.gate)  # for the virtual clock, who sleeps there would be late at once
    site.keep("12")
    site.go()
    site.keep("13")
    site.go()
    with site.gate.open("w") as gate:
        site.gate.unlink()  # the next one finds none
        gate.write("now\n")
    site.done()
    assert len(site.done()) == 2


def test_what_cannot_be_told_is_dropped_and_logged(site: Site) -> None:
    site.qalter(1)
    site.keep("12")
    site.go()
    site.done()
    assert "job 12 was refused" in site.said()


def test_many_refusals_are_told_bit_by_bit(site: Site) -> None:
    for job in range(MOST_REFUSALS + 5):
        site.keep(str(100 + job))
    site.go()
    assert len(site.done()) == MOST_REFUSALS
    assert len(site.done()) == MOST_REFUSALS + 5


def test_a_refusal_from_long_before_gpulockd_is_not_told(site: Site) -> None:
    begun = clock_boottime()
    lines = [f"{begun - RECENT - 5:.3f} refused 12 no", f"{begun - 5:.3f} refused 13 no"]
    (site.box.lock / "events").write_text("\n".join(lines) + "\n")
    site.go()
    assert site.done() == ["-ac gpulock=no 13"]


def test_on_a_node_without_grid_engine_nobody_is_told(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.lock.mkdir()
    note_event(str(box.lock), REFUSED, "12", WHY)
    chore = RefusalNotifier(DaemonJournal(-1, quiet=True))
    chore.run(box.node(), ReconcileReport([], []), 0.0)
    assert chore.asking is None


def test_a_value_is_one_variable_on_one_line() -> None:
    assert format_context_value('a, b="c"\nd') == "a; b='c'?d"
    assert len(format_context_value("x" * 10_000)) == LENGTH
