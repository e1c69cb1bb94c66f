# SPDX-License-Identifier: Apache-2.0
"""How a process of this gpulock starts another: a package's library is on no interpreter's path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import gpulock

LIBRARY: Final = Path("/usr/lib/gpulock/python")  # a package's; its __main__.py runs a module


def is_package() -> bool:
    """Say whether this gpulock is a distribution's package."""
    return Path(gpulock.__file__).parents[1] == LIBRARY


def module_command(module: str) -> list[str]:
    """Return how another process runs a module of this gpulock."""
    return [sys.executable, "-I", *([str(LIBRARY)] if is_package() else ["-m"]), module]
