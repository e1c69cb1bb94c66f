# SPDX-License-Identifier: Apache-2.0
"""The older release of gpulock that a lab upgrades from.

It is `this` tree under an older number until there is a release: earlier commits have claims
without a record. GPULOCK_OLDER names a commit, or an archive as `git archive` writes it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

THIS: Final = "this"
OLDER: Final = os.environ.get("GPULOCK_OLDER", THIS)
PARTS: Final = ("gpulock", "prolog", "epilog")
_ROOT: Final = Path(__file__).resolve().parents[2]


class NoOlderReleaseError(Exception):
    """Say that the older release is not here, and what to do."""


def read_older_archive() -> bytes:
    """Return the archive of the older release; raise NoOlderReleaseError."""
    if Path(OLDER).is_file():
        return Path(OLDER).read_bytes()
    command = ["git", "-C", str(_ROOT), "archive", OLDER, *PARTS]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            return done.stdout
        why = " ".join(done.stderr.decode(errors="replace").split())
    except OSError as fault:
        why = str(fault)
    raise NoOlderReleaseError(
        f"no older release {OLDER} ({why}): git fetch --unshallow, or GPULOCK_OLDER=FILE, which is"
        f" `git archive` of its {' '.join(PARTS)}; GPULOCK_OLDER={THIS} is this tree, renumbered"
    )
