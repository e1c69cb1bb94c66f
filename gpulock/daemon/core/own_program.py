# SPDX-License-Identifier: Apache-2.0
"""How a process of this gpulock starts another, also where its library is on no Python's path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import gpulock

PACKAGE: Final = Path("/usr/lib/gpulock/python")


def library_folder() -> Path:
    """Return the folder that this gpulock is imported from."""
    return Path(gpulock.__file__).parents[1]


def is_package() -> bool:
    """Say whether this gpulock is a distribution's package."""
    return library_folder() == PACKAGE


def module_command(module: str) -> list[str]:
    """Return how another process runs a module of this gpulock.

    A library of its own has a __main__.py, which runs a module (packaging/build.py).
    """
    library = library_folder()
    is_own = (library / "__main__.py").exists()
    return [sys.executable, "-I", str(library) if is_own else "-m", module]
