# SPDX-License-Identifier: Apache-2.0
"""The mutants: one small wrong change each, and the test that must see it. Data: `*.toml` here.

A table is named by the file that it changes. `from` stands there exactly once, `to` takes its
place. `test` is the pytest id that fails then: the quickest unit test that does. With
`equivalent`, a sentence that says why nobody can tell the difference, `test` is what passes still.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).resolve().parents[2]
KEYS = frozenset(("from", "to", "test"))


class Mutant(NamedTuple):
    """One row: in `file`, `old` becomes `new`; `test` fails then, unless it is `equivalent`."""

    file: str
    old: str
    new: str
    test: str
    equivalent: str

    def __str__(self) -> str:
        """Return where it is and what it changes, on two lines."""
        return f"{self.file}\n    {shorten(self.old)}  ->  {shorten(self.new)}"


def shorten(text: str) -> str:
    """Return a piece of code on one line."""
    return " ".join(text.split())[:100] or "(nothing)"


def read_mutants(folder: Path = ROOT / "tests/mutants") -> list[Mutant]:
    """Return every row of the tables in a folder; raise ValueError for one that is malformed."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        tables: dict[str, list[dict[str, str]]] = tomli.loads(path.read_text())
        for file, rows in tables.items():
            for row in rows:
                if not KEYS <= row.keys() <= KEYS | {"equivalent"}:
                    raise ValueError(f"{path.name}: {file}: a row has {sorted(row)}")
                why = row.get("equivalent", "")
                found.append(Mutant(file, row["from"], row["to"], row["test"], why))
    return found


def mutate_text(text: str, mutant: Mutant) -> str:
    """Return the changed text; raise ValueError or SyntaxError where the row does not fit it."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"`from` is there {count} times, not once: {mutant}")
    changed = text.replace(mutant.old, mutant.new)
    if mutant.old.split() == mutant.new.split():
        raise ValueError(f"nothing is changed: {mutant}")
    ast.parse(changed, mutant.file)
    return changed


def why_no_such_test(mutant: Mutant, root: Path = ROOT) -> str:
    """Return why the test of a row is not there, or nothing."""
    file, _, name = mutant.test.partition("::")
    path = root / file
    if not path.is_file():
        return f"no file {file}"
    name = name.partition("[")[0].rpartition("::")[2]
    names = set(re.findall(r"^ *def (test_\w+)", read_test_file(path), re.MULTILINE))
    if not name:
        return "" if mutant.equivalent else f"no test is named: {mutant}"
    return "" if name in names else f"{file} has no test {name}"


@cache
def read_test_file(path: Path) -> str:
    """Return the text of a file, which many rows name."""
    return path.read_text()
