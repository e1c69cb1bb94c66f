# SPDX-License-Identifier: Apache-2.0
"""Whether STATE_DIR has a record of every claim of this boot, for an adoption.

Hot, loaded at the first claim of a boot and where STATE_DIR is full. One empty file says it by its
name, for a rename needs no room: `runs.whole`, or `runs.partial` once a claim had to go on without
its record. From then on a lost LOCK_DIR is not filled again, because a job would be missing in it.
A reconcile writes what is missing as soon as there is room; meanwhile the file is `runs.mending`.
"""

import errno
import os

from gpulock.store import atomic

WHOLE, PARTIAL, REPAIRING = "runs.whole", "runs.partial", "runs.mending"
TRIES = 3  # a reconcile renames at most twice while we look


def begin_adoption_state(state_dir: str) -> None:
    """Let a boot begin, in which nothing was claimed: what an earlier one lacked is of no use."""
    rename_adoption_state(state_dir, WHOLE, PARTIAL, REPAIRING)


def create_adoption_state(state_dir: str) -> None:
    """Make the file where no boot did so; what fails lets a full disk refuse claims.

    That is after STATE_DIR has its boot id: this file without one says that the id was lost.
    """
    try:
        atomic.create_file(f"{state_dir}/{WHOLE}", b"")
    except OSError:  # among others: it is there
        return


def mark_record_missing(state_dir: str) -> None:
    """Note that a claim has no record; raise OSError where that cannot be noted."""
    for _ in range(TRIES):
        if rename_adoption_state(state_dir, PARTIAL, WHOLE, REPAIRING):
            return
        if os.path.lexists(f"{state_dir}/{PARTIAL}"):
            return
    raise FileNotFoundError(errno.ENOENT, "cannot be noted", f"{state_dir}/{WHOLE}")


def begin_record_repair(state_dir: str) -> None:
    """Begin to write what is missing, or what an earlier version never said; raise OSError."""
    path = f"{state_dir}/{REPAIRING}"
    if not rename_adoption_state(state_dir, REPAIRING, PARTIAL) and not os.path.lexists(path):
        atomic.create_file(path, b"")


def rename_adoption_state(state_dir: str, new: str, *names: str) -> bool:
    """Rename the file, which has one of these names; return whether it has; raise OSError."""
    for name in names:
        try:
            os.rename(f"{state_dir}/{name}", f"{state_dir}/{new}")
        except FileNotFoundError:
            continue
        return True
    return False
