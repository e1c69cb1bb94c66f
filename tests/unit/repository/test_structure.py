# SPDX-License-Identifier: Apache-2.0
"""The tree keeps its shape: small folders with a purpose, no circles, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.layers import EXPORTER, ORDER

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"gpulock": ROOT / "gpulock", "gpulock_exporter": ROOT / "exporter/gpulock_exporter"}
MOST_MODULES = 20  # in one folder
MOST_LINES = 350  # in one module
MOST_SHARED = 0.1  # of all top-level functions


@cache
def module_texts() -> dict[Path, str]:
    """Return every module of the product."""
    paths = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]
    return {path: path.read_text() for path in paths}


def names_of(kind: str) -> Counter[str]:
    """Return how many modules define each top-level name of a `def` or `class`."""
    pattern = re.compile(rf"^{kind} (\w+)", re.MULTILINE)
    return Counter(name for text in module_texts().values() for name in set(pattern.findall(text)))


def imports_of(name: str) -> dict[str, set[str]]:
    """Return what each module of a package imports: at its top, in functions, for types."""
    graph = grimp.build_graph(name, cache_dir=None, exclude_type_checking_imports=False)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circular(left: dict[str, set[str]]) -> list[str]:
    """Return the modules of circles, and those that lead to one."""
    while ends := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in ends}
    return sorted(left)


def test_a_circle_is_found() -> None:
    assert circular({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circular({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(name: str) -> None:
    assert circular(imports_of(name)) == []


def test_no_folder_has_more_modules_than_a_reader_keeps_in_mind() -> None:
    modules = Counter(path.parent for path in module_texts())
    assert {folder for folder, number in modules.items() if number - 1 > MOST_MODULES} == set()


def test_each_package_says_what_belongs_there() -> None:
    packages = {path: text for path, text in module_texts().items() if path.name == "__init__.py"}
    told = {path: ast.get_docstring(ast.parse(text)) or "" for path, text in packages.items()}
    top = {PACKAGES[name] / "__init__.py" for name in PACKAGES}
    # what it is, and where that is which does not belong there
    assert [path for path, words in told.items() if not words] == []
    assert [path for path in told.keys() - top if "\n\n" not in told[path]] == []


@pytest.mark.parametrize(
    ("name", "order"), [("gpulock", ORDER), ("gpulock_exporter", tuple(EXPORTER))]
)
def test_every_package_has_its_place_in_the_order(name: str, order: tuple[str, ...]) -> None:
    folder = PACKAGES[name]
    parents = {path.parent for path in module_texts() if path.is_relative_to(folder)}
    assert {".".join(parent.relative_to(folder).parts) for parent in parents} == set(order)


def test_no_module_is_longer_than_one_idea_takes() -> None:
    lines = {path: len(text.splitlines()) for path, text in module_texts().items()}
    assert {path: number for path, number in lines.items() if number > MOST_LINES} == {}


def test_no_class_name_is_used_twice() -> None:
    assert [name for name, number in names_of("class").items() if number > 1] == []


def test_a_function_is_found_by_its_name() -> None:
    names = names_of("def")
    shared = sum(number for number in names.values() if number > 1)
    assert shared < MOST_SHARED * sum(names.values())


def test_no_test_is_skipped() -> None:
    """A check that cannot run fails, or is left out by a mark that CONTRIBUTING.md names."""
    skips = re.compile(r"\bpytest\.(skip\(|mark\.skip|importorskip)")
    paths = [*(ROOT / "tests").rglob("*.py")]
    assert len(paths) > 300
    assert [str(path) for path in paths if skips.search(path.read_text())] == []
