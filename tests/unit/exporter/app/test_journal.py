# SPDX-License-Identifier: Apache-2.0
"""What fails is told to the journal with its reason: once, and not in a flood."""

from __future__ import annotations

from gpulock_exporter.app.exporter import LONGEST, QUIET, FaultJournal


def test_a_fault_and_its_end_are_told_once_each() -> None:
    journal = FaultJournal()
    assert journal.lines({}, 0) == []
    assert journal.lines({"locks": "no such file"}, 1) == ["locks: no such file"]
    assert journal.lines({"locks": "no such file"}, 100) == []
    assert journal.lines({}, 101) == ["locks: recovered"]
    assert journal.lines({}, 102 + QUIET) == []


def test_what_comes_and_goes_is_told_now_and_then_and_in_the_end_as_it_is() -> None:
    journal, said = FaultJournal(), list[str]()
    for second in range(100):
        said += journal.lines({"driver": "hangs"} if second % 2 else {}, float(second))
    assert 2 <= len(said) <= 100 / QUIET + 1
    last = journal.lines({}, 200.0)
    assert (said + last)[-1] == "driver: recovered"


def test_another_reason_is_told_and_what_stands_in_it_is_one_line() -> None:
    journal = FaultJournal()
    journal.lines({"xid": "Unknown Error"}, 0)
    (line,) = journal.lines({"xid": "a\nb\x1b[31m" + "c" * 1000}, QUIET)
    assert line.startswith("xid: a?b?[31mccc") and len(line) == len("xid: ") + LONGEST
