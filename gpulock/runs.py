# SPDX-License-Identifier: Apache-2.0
"""Records kept for adoption after a lost LOCK_DIR: STATE_DIR/runs, one a claim.

Hot. Of jobs that have no spool directory to keep theirs in: Slurm's, and `gpulock run`'s.
"""

import os

from gpulock import atomic, owner
from gpulock.owner import Owner

FOLDER = "runs"


def keep(state_dir: str, record: Owner) -> None:
    """Note a claim for a later adoption; raise OSError."""
    data = owner.encode(record).encode("utf-8")
    try:
        atomic.replace_file(f"{state_dir}/{FOLDER}/{record.token}", data)
    except FileNotFoundError:
        os.makedirs(f"{state_dir}/{FOLDER}", 0o755, exist_ok=True)
        atomic.replace_file(f"{state_dir}/{FOLDER}/{record.token}", data)


def forget(state_dir: str, token: str) -> None:
    """Drop the note of a claim that is over."""
    atomic.remove_quietly(f"{state_dir}/{FOLDER}/{token}")
