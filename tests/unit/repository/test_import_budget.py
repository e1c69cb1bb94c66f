# SPDX-License-Identifier: Apache-2.0
"""What a hook loads before it works is paid for by every job: only what the budget names."""

import ast
import importlib
import inspect
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import tomli

from gpulock.install.hook_script import HOOKS, render_python_hook
from tests.layers import HOT_ONE_OF, HOT_STANDARD, is_ours, layer_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "prolog/hook"


def imports_of(hook: str) -> str:
    """Return the import statements of a hook, but for that of its modules as one file."""
    script = render_python_hook(hook, sys.executable, str(ROOT), "/etc/gpulock/gpulock.conf")
    return "\n".join(
        ast.unparse(node)
        for node in ast.parse(script).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
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


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_loads_nothing_outside_the_budget(hook: str) -> None:
    loaded = loaded_by(imports_of(hook))

    assert "gpulock" in loaded
    assert over_budget(loaded) == []


@pytest.mark.slow
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
    shutil.copytree(ROOT / "gpulock", tmp_path / "gpulock")
    shutil.rmtree(tmp_path / "gpulock" / "cli", ignore_errors=True)
    (tmp_path / "gpulock" / "cli.py").touch()
    with (tmp_path / "gpulock" / "__init__.py").open("a") as module:
        module.write(f"\n{planted}\n")

    assert found in over_budget(loaded_by(imports_of("prolog/sge"), tmp_path))


@pytest.mark.parametrize("module", HOT_ONE_OF)
def test_one_of_functools_and_contextlib_is_within_the_budget(module: str) -> None:
    assert over_budget(loaded_by(f"import os, {module}")) == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_calls_its_main_as_that_is_defined(hook: str) -> None:
    _, module, words = HOOKS[hook]
    main = importlib.import_module(f"gpulock.{module}").main

    values = {"sys.argv": ["hook"], "os.environ": os.environ, "CONFIG": ""}
    bound = inspect.signature(main).bind(*(values[word] for word in words.split(", ")))

    names = {"argv": "sys.argv", "environ": "os.environ", "config": "CONFIG"}
    assert [names[name] for name in bound.arguments] == words.split(", ")


def test_every_hook_of_the_checkout_is_the_one_script() -> None:
    tools = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]

    assert all((ROOT / hook).resolve() == ROOT / SCRIPT for hook in HOOKS)
    assert SCRIPT in tools["pyright"]["include"]
    assert SCRIPT in tools["mypy"]["files"]
    assert SCRIPT in tools["ruff"]["extend-include"]
