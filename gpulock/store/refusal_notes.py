# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/refused: what a hook told a job it refused, for gpulockd to bring where its user looks.

Hot, loaded for a refusal alone. The hook has no time to speak to a scheduler, and must not fail
because it could not leave a note: what cannot be written is lost, it stands in the log as well.
"""

from __future__ import annotations

import os

from gpulock.store import atomic

FOLDER = "refused"
MOST = 200  # notes; more than that nobody takes away


def write_refusal_note(lock_dir: str, job: str, sentence: str) -> None:
    """Leave a note of a refused job; a later one of the same job takes its place."""
    if not (job.isascii() and job.isdigit()):
        return
    folder = f"{lock_dir}/{FOLDER}"
    try:
        if len(os.listdir(make_refusal_folder(folder))) < MOST:
            atomic.replace_file(f"{folder}/{job}", sentence.encode("utf-8", "backslashreplace"))
    except OSError:
        return


def make_refusal_folder(folder: str) -> str:
    """Make the folder where it is missing; return it."""
    try:
        os.mkdir(folder, 0o755)
    except FileExistsError:
        pass
    return folder
