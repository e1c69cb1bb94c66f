# SPDX-License-Identifier: Apache-2.0
"""What a hook loads before it works is paid for by every job: only what the budget names."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gpulock.install.hook_script import HOOKS, render_python_hook
from tests.layers import HOT_ONE_OF, HOT_STANDARD, is_ours, layer_of

ROOT = Path(__file__).resolve().parents[3]


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
