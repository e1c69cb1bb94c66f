# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/owed: a copy of each claim's record, until its line is in the history.

Hot. So a reboot loses no line. The writer of the line removes the copy.
"""

import os

from gpulock.store import atomic, events, grants, owner
from gpulock.store.locks import LockStore
from gpulock.store.owner import Owner

FOLDER = "owed"
CAP = 1000  # records that are kept over a boot


def note_owed_line(state_dir: str, store: LockStore, record: Owner) -> None:
    """Note that a claim will be owed a line of the history; what fails here fails no job.

    Where finished claims pile up nobody writes a history: these records would pile up as well.
    """
    folder = f"{state_dir}/{FOLDER}"
    try:
        waiting = len(os.listdir(store.finished_dir))
    except OSError:
        waiting = 0  # the records are lost this moment: nothing else is left of the claim
    if waiting >= grants.FINISHED_PRUNE:
        return
    try:
        if not os.path.isdir(folder):
            atomic.mkdir_if_missing(folder)  # another claim does the same
        atomic.replace_file(f"{folder}/{record.token}", owner.encode_owner(record).encode())
    except (OSError, ValueError):
        return


def limit_owed_records(state_dir: str, store: LockStore) -> None:
    """Drop the oldest records once there are too many, as far as that is possible; count them."""
    try:
        oldest = atomic.list_oldest(f"{state_dir}/{FOLDER}", CAP)
    except OSError:
        return
    if oldest:
        events.note_event(store.path, events.DROPPED, str(len(oldest)))
    for path in oldest:
        atomic.remove_quietly(path)
