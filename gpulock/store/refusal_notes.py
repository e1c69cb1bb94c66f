# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/refused: what a hook told a job it refused, for gpulockd and `gpulock why`.

Hot, loaded for a refusal alone. The hook has no time to speak to a scheduler, and must not fail
because it could not leave a note: what cannot be written is lost, it stands in the log as well.
"""

from __future__ import annotations

import os

from gpulock.store import atomic

FOLDER = "refused"
TOLD = "refused_told"  # what gpulockd has taken and told
MOST = 200  # notes in each folder
LIMIT = 4096  # bytes of a note


def write_refusal_note(lock_dir: str, job: str, sentence: str) -> None:
    """Leave a note of a refused job; a later one of the same job takes its place."""
    if not (job.isascii() and job.isdigit()):
        return
    folder = f"{lock_dir}/{FOLDER}"
    try:
        atomic.mkdir_if_missing(folder)
        if len(os.listdir(folder)) < MOST:
            atomic.replace_file(f"{folder}/{job}", sentence.encode("utf-8", "backslashreplace"))
    except OSError:
        return


def keep_told_note(lock_dir: str, job: str, path: str) -> None:
    """Move a note that was taken to those told; the oldest give way. Raises OSError."""
    folder = f"{lock_dir}/{TOLD}"
    atomic.mkdir_if_missing(folder)
    os.rename(path, f"{folder}/{job}")
    kept = [f"{folder}/{name}" for name in os.listdir(folder)]
    if len(kept) > MOST:
        for old in sorted(kept, key=lambda one: os.lstat(one).st_mtime)[:-MOST]:
            atomic.remove_quietly(old)


def read_refusal_note(lock_dir: str, job: str) -> tuple[str, float] | None:
    """Return what a job was told when it was refused last, and when (seconds since 1970)."""
    for folder in (FOLDER, TOLD):
        path = f"{lock_dir}/{folder}/{job}"
        try:
            return atomic.read_text(path, LIMIT), os.stat(path).st_mtime
        except OSError:
            continue
    return None
