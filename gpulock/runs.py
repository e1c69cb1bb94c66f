# SPDX-License-Identifier: Apache-2.0
"""Records kept for adoption after a lost LOCK_DIR: STATE_DIR/runs, one a claim.

Hot. Of jobs that have no spool directory to keep theirs in: Slurm's, and `gpulock run`'s.
"""

import os

from gpulock import atomic, kv, owner
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


def drop(state_dir: str, record: Owner, device: str) -> None:
    """Take a device out of its claim's record, before its lock goes: nobody adopts it again."""
    path = f"{state_dir}/{FOLDER}/{record.token}"
    left: tuple[str, ...] = ()
    try:
        if record.devices != (device,):
            kept = owner.parse(atomic.read_text(path))
            left = tuple([name for name in kept.devices if name != device])
        if left:
            keep(state_dir, record.copy(devices=left))
            return
    except FileNotFoundError:
        return
    except (OSError, kv.MalformedError):
        pass  # whatever it is, it is no claim to come back to
    atomic.remove_quietly(path)
