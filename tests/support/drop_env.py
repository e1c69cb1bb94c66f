# SPDX-License-Identifier: Apache-2.0
"""`prolog/drop-env`, compiled once a test process."""

from __future__ import annotations

from pathlib import Path

from gpulock.install import drop_env

SHARE = Path(__file__).parents[2] / "prolog"


def write_drop_env(folder: Path) -> Path:
    """Write the program below `folder`, where hooks have it; return its path."""
    path = folder / "prolog" / drop_env.DROP_ENV
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drop_env.drop_env_program(SHARE))
    path.chmod(0o755)
    return path
