# SPDX-License-Identifier: Apache-2.0
"""Each place of the hooks that says `broken` is a row of docs/reliability.md, with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.layers import HOT

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reliability.md"
SAYS = ("BROKEN", "os_error_kind", "NODE_BROKEN")
ROW = re.compile(r"^\| `([\w/]+\.py)` `([\w.]+)` \| (.+) \|$", re.MULTILINE)


def find_places(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the function of each use of such a kind; to compare with it is none."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from find_places(node, (*names, node.name))
        elif isinstance(node, ast.Compare):
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in SAYS:
            yield ".".join(names)
        else:
            yield from find_places(node, names)


def places() -> set[tuple[str, str]]:
    """Return (file, function) of each place in what a hook loads."""
    package = ROOT / "gpulock"
    files = [path for name in HOT for path in (package / name).glob("*.py")]
    found = {
        (str(path.relative_to(package)), name)
        for path in files
        for name in find_places(ast.parse(path.read_text()))
    }
    return {(file, name) for file, name in found if name}


def test_each_place_that_says_broken_is_a_row_with_its_reason_and_each_row_a_place() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert len({row[:2] for row in rows}) == len(rows)
    assert {(file, name) for file, name, _ in rows} == places()
