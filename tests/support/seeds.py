# SPDX-License-Identifier: Apache-2.0
"""The seed of a commit: it always tries the same, and the next one tries something else."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 7


def chosen_seed(variable: str) -> int:
    """Return the seed that a variable of the environment names, else that of the commit."""
    return int(os.environ.get(variable) or commit_seed())


@functools.cache
def commit_seed() -> int:
    """Return the first digits of this checkout's commit, 0 where git knows none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return 0
    return int(done.stdout[:DIGITS], 16) if done.returncode == 0 else 0
