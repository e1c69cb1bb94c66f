# SPDX-License-Identifier: Apache-2.0
"""What a hook loads before it works is paid for by every job: only what the budget names."""

import ast
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.layers import HOT_ONE_OF, HOT_STANDARD, is_ours, layer_of

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("prolog", "epilog")


def python_hooks(root: Path) -> list[str]:
    """List the hooks written in Python, as paths below `root`."""
    return sorted(
        str(path.relative_to(root))
        for folder in FOLDERS
        for path in (root / folder).glob("*")
        if path.is_file() and b"python" in path.read_bytes().partition(b"\n")[0]
    )


def imports_of(hook: Path) -> str:
    """Return the import statements of a script, without the rest of it."""
    return "\n".join(
        ast.unparse(node)
        for node in ast.walk(ast.parse(hook.read_text()))
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
    )


def loaded_by(imports: str, library: Path = ROOT) -> set[str]:
    """Run import statements the way a hook's interpreter would, and name every module loaded."""
    program = f"import sys\nsys.path.insert(0, {str(library)!r})\n{imports}\n"
    done = subprocess.run(
        [sys.executable, "-IS", "-X", "importtime", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines[1:]}  # the first is a heading


@cache
def cost_of(*modules: str) -> set[str]:
    """Name what these modules load, the interpreter's own start included."""
    return loaded_by("\n".join(f"import {module}" for module in modules))


def over_budget(loaded: set[str]) -> list[str]:
    """List the modules that no hook may load."""
    allowed = cost_of(*sorted(HOT_STANDARD))
    extra = next((module for module in HOT_ONE_OF if module in loaded), None)
    if extra:
        allowed = allowed | cost_of(extra)
    hot = {module for module in loaded if is_ours(module) and layer_of(module) == "hot"}
    return sorted(loaded - allowed - hot)


@pytest.mark.parametrize("hook", python_hooks(ROOT))
def test_a_hook_loads_nothing_outside_the_budget(hook: str) -> None:
    loaded = loaded_by(imports_of(ROOT / hook))

    assert "gpulock" in loaded
    assert over_budget(loaded) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("import json", "json"),
        ("from typing import Final", "typing"),
        ("import collections", "collections"),
        ("import signal", "signal"),
        ("import gpulock.cli", "gpulock.cli"),
    ],
)
def test_one_import_too_many_is_caught(planted: str, found: str, tmp_path: Path) -> None:
    for folder in (*FOLDERS, "gpulock"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.rmtree(tmp_path / "gpulock" / "cli", ignore_errors=True)
    (tmp_path / "gpulock" / "cli.py").touch()
    with (tmp_path / "gpulock" / "__init__.py").open("a") as module:
        module.write(f"\n{planted}\n")

    imports = imports_of(tmp_path / python_hooks(tmp_path)[0])

    assert found in over_budget(loaded_by(imports, tmp_path))


@pytest.mark.parametrize("module", HOT_ONE_OF)
def test_one_of_functools_and_contextlib_is_within_the_budget(module: str) -> None:
    assert over_budget(loaded_by(f"import os, {module}")) == []


def test_every_hook_is_linted_and_type_checked() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]

    hooks = set(python_hooks(ROOT))

    assert {Path(hook).parent.name for hook in hooks} == set(FOLDERS)
    assert hooks <= set(tools["pyright"]["include"])
    assert hooks <= set(tools["ruff"]["extend-include"])
