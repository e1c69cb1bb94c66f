# SPDX-License-Identifier: Apache-2.0
"""No module imports what its layer must not, at its top or inside a function; no circles.

What a hook loads before it works is paid for by every job: only what the budget names.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

from gpulock.install.hook_script import HOOKS, render_python_hook
from tests.layers import (
    EXPORTER,
    HOT_ONE_OF,
    HOT_STANDARD,
    ORDER,
    exporter_violation,
    is_ours,
    layer_of,
    violation,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "gpulock": (ROOT / "gpulock", ORDER),
    "gpulock_exporter": (ROOT / "exporter/gpulock_exporter", tuple(EXPORTER)),
}


def broken_rules(package: str) -> list[str]:
    """Return each import that breaks a rule; imports for types alone are free."""
    graph = grimp.build_graph(
        *PACKAGES,  # of one that is not its own it would know the name alone
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    rule_of = violation if package == "gpulock" else exporter_violation
    return [
        f"{importer} imports {imported}: {rule}"
        for importer in sorted(graph.modules)
        if importer.partition(".")[0] == package
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (rule := rule_of(importer, imported))
    ]


def circular(left: dict[str, set[str]]) -> list[str]:
    """Return the modules of circles, and those that lead to one."""
    while ends := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in ends}
    return sorted(left)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_keeps_to_its_layer(package: str) -> None:
    assert broken_rules(package) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_place_in_the_order(package: str) -> None:
    folder, order = PACKAGES[package]
    parents = {path.parent for path in folder.rglob("*.py")}
    assert {".".join(parent.relative_to(folder).parts) for parent in parents} == set(order)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=False)
    assert circular({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}) == []


@cache
def loaded_by(imports: str) -> set[str]:
    """Name every module that a hook's interpreter loads for these statements, or has already."""
    program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{imports}\n"
    words = [sys.executable, "-IS", "-X", "importtime", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_loads_nothing_outside_the_budget(hook: str) -> None:
    script = render_python_hook(hook, sys.executable, str(ROOT), "/etc/gpulock/gpulock.conf")
    imports = [n for n in ast.parse(script).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    loaded = loaded_by("\n".join(map(ast.unparse, imports)))
    allowed = loaded_by(f"import {', '.join([*sorted(HOT_STANDARD), HOT_ONE_OF[0]])}")

    assert "gpulock" in loaded
    hot = {module for module in loaded if is_ours(module) and layer_of(module) == "hot"}
    assert loaded - allowed - hot == set()
