# SPDX-License-Identifier: Apache-2.0
"""A name says what the value is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EMPTY = {"found", "told", "look", "looks"}  # they fit every value


def named(node: ast.AST) -> str:
    """Return the name that a node gives to something, without leading underscores."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name.strip("_")
    if isinstance(node, ast.arg):
        return node.arg.strip("_")
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return (node.id if isinstance(node, ast.Name) else node.attr).strip("_")
    return ""


@pytest.mark.parametrize("package", ["gpulock", "exporter"])
def test_no_name_of_the_product_is_one_of_those_that_fit_everything(package: str) -> None:
    empty = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {named(node)}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if named(node).lower() in EMPTY and hasattr(node, "lineno")
    ]
    assert empty == []
