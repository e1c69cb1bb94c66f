# SPDX-License-Identifier: Apache-2.0
"""Mutants are small wrong changes of a function; `make mutants` says which of them survive."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants.operators import Mutant, generate_mutants
from tests.mutants.run import (
    ROOT,
    Result,
    list_complaints,
    list_mutants,
    read_survivors,
    try_mutants,
)
from tests.mutants.trial import KILLED, SURVIVED, TIMEOUT

CODE = '''"""A module."""

LIMIT = 3


class Part:
    def fits(self, size: int = 0) -> bool:
        """Return whether it is small."""
        return size < LIMIT


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def check(names: list[str], flags: int) -> int:
    if not names:
        raise ValueError(f"no names: {len(names) + 1}")
    if all(names) and flags:
        names.clear()
    return flags | 2
'''
IN_PROCESS = """from gpulock.part.module import Part, check


def test_edge() -> None:
    assert not Part().fits(3)


def test_names() -> None:
    names = ["a"]
    check(names, 1)
    assert not names
"""
OF_A_PROGRAM = """import subprocess
import sys

PROGRAM = "from gpulock.part.module import read; read('no')"


def test_program() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
"""


def test_each_known_survivor_is_a_mutant_of_today_and_has_its_reason() -> None:
    known = read_survivors()
    files = sorted({file for file, _ in known})
    assert known.keys() <= {(mutant.file, mutant.name) for mutant in list_mutants(files)}
    assert [why for why in known.values() if not why.startswith(("equivalent: ", "open: "))] == []


def test_a_survivor_that_is_not_known_is_told_and_a_known_one_that_is_killed() -> None:
    mutants = [Mutant("part.py", "f", 1, 2, 2, 0, 1, "", name) for name in ("a", "b", "c", "d")]
    codes = (SURVIVED, SURVIVED, KILLED, TIMEOUT)
    results = [Result(mutant, code, 0.1) for mutant, code in zip(mutants, codes)]
    known = {("part.py", name): "open: " for name in ("b", "c", "d")}
    told = list_complaints(results, known)
    assert [line.split()[0] for line in told] == ["survived:", "known"]
    assert "a" in told[0].split() and "c" in told[1].split()


@pytest.mark.slow
@pytest.mark.giant
def test_a_mutant_is_seen_in_a_test_and_in_a_program_that_a_test_starts(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    texts = {
        "gpulock/__init__.py": "",
        "gpulock/part/module.py": CODE,
        "tests/unit/part/test_part.py": IN_PROCESS,
        "tests/unit/part/test_program.py": OF_A_PROGRAM,
        "pytest.ini": "[pytest]\nmarkers =\n    slow:\n",
    }
    for name, text in texts.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    shutil.copytree(ROOT / "tests/mutants", tree / "tests/mutants")
    mutants = generate_mutants("gpulock/part/module.py", CODE.encode())
    (tmp_path / "scratch").mkdir()
    results = try_mutants(mutants, tree, tmp_path / "scratch", 2)
    killed = {result.mutant.name for result in results if result.code == KILLED}
    assert killed == {
        "return size < LIMIT: size < LIMIT -> (size <= LIMIT)",
        'return "" -> raise',  # in a program alone
        "if not names:: not names -> names",
        "if all(names) and flags:: all(names) and flags -> (not (all(names) and flags))",
        "names.clear() -> pass",
    }
    assert {result.code for result in results} == {SURVIVED, KILLED}
    assert (tree / "gpulock/part/module.py").read_text() == CODE
