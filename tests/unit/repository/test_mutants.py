# SPDX-License-Identifier: Apache-2.0
"""The table of mutants fits the code and its tests; `make mutants` can tell what survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run import EQUIVALENT, KILLED, SURVIVED, WRONG, run_mutants
from tests.mutants.table import ROOT, Mutant, mutate_text, read_mutants, why_no_such_test

ROWS = read_mutants()
CODE = "def f(a: int) -> bool:\n    return a < 3\n"
TESTS = """from part import f

def test_low() -> None:
    assert f(0)

def test_edge() -> None:
    assert not f(3)
"""


def test_every_mutant_changes_one_place_of_the_code_as_it_is() -> None:
    texts = {row.file: (ROOT / row.file).read_text() for row in ROWS}
    for row in ROWS:
        mutate_text(texts[row.file], row)


def test_the_test_of_every_mutant_is_there() -> None:
    assert [why for row in ROWS if (why := why_no_such_test(row))] == []


def test_no_mutant_is_there_twice_and_there_are_as_many_as_were_asked_for() -> None:
    assert len({row[:3] for row in ROWS}) == len(ROWS) >= 155


def test_a_mutant_that_does_not_fit_the_code_any_more_is_told() -> None:
    for old, new in (("a < 4", "a < 5"), ("a", "b"), ("a < 3", "a  < 3")):
        with pytest.raises(ValueError, match=r"`from` is there|nothing is changed"):
            mutate_text(CODE, Mutant("part.py", old, new, "", ""))


@pytest.mark.slow
def test_what_survives_and_what_is_not_equivalent_is_told(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "part.py").write_text(CODE)
    (tree / "test_part.py").write_text(TESTS)
    (tree / "pytest.ini").write_text("[pytest]\npythonpath = .\n")

    def row(new: str, test: str, why: str = "") -> Mutant:
        return Mutant("part.py", "a < 3", new, f"test_part.py::{test}", why)

    rows = [
        row("a <= 3", "test_edge"),
        row("a <= 3", "test_low"),
        row("not a >= 3", "test_edge", "It is the same."),
        row("a <= 3", "test_edge", "It is said to be the same."),
        row("a < b", "test_gone"),
    ]
    found = list(run_mutants(rows, tree, tmp_path, 2))
    assert [word for word, _ in found] == [WRONG]  # a test that is not there
    found = list(run_mutants(rows[:4], tree, tmp_path / "again", 2))
    assert [word for word, _ in found] == [KILLED, SURVIVED, EQUIVALENT, WRONG]
    assert (tree / "part.py").read_text() == CODE
