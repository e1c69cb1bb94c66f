# SPDX-License-Identifier: Apache-2.0
"""The file `isolation` beside the records: below which cgroups jobs were confined, one a line.

Hot. It is there as soon as isolation was ever on, and says where a reconcile has to look: a node
may have thousands of cgroups, and the schedulers' daemons are in two. It is written before a job's
cgroup is made, and is no record of jobs.
"""

import os

from gpulock.store import atomic
from gpulock.store.locks import LockStore

MARK = "isolation"


def note_cgroup_folders(store: LockStore, folders: list[str]) -> None:
    """Note folders that are not noted yet; raise Refusal or OSError."""
    known = read_cgroup_folders(store)
    missing = [folder for folder in folders if folder not in known]
    if not missing and os.path.lexists(f"{store.root}/{MARK}"):
        return
    store.check(make=True)
    # a line that somebody was killed in must not be the beginning of ours
    lines = "".join([f"\n{folder}\n" for folder in missing])
    atomic.append_file(f"{store.root}/{MARK}", lines.encode())


def read_cgroup_folders(store: LockStore) -> list[str]:
    """Return the folders below which there may be cgroups of jobs; raise OSError."""
    try:
        text = atomic.read_text(f"{store.root}/{MARK}")
    except FileNotFoundError:
        return []
    return [line for line in dict.fromkeys(text.split("\n")) if line.startswith("/")]


def remove_cgroup_marks(store: LockStore) -> None:
    """Take the file away: nothing is confined here any more."""
    atomic.remove_quietly(f"{store.root}/{MARK}")
