# SPDX-License-Identifier: Apache-2.0
"""Programs that stand for those of a site."""

from __future__ import annotations

import shutil
from pathlib import Path


def write_script(path: Path, body: str) -> None:
    """Put a shell script in the place of what is there, which may be about to run.

    The kernel lets nobody write a program that it begins to run (ETXTBSY, execve(2)).
    """
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(f"#!/bin/sh\n{body}\n")
    beside.chmod(0o755)
    beside.rename(path)


def copy_program(source: Path, place: Path) -> None:
    """Copy a program; others may not write it, whatever umask the checkout was made with."""
    shutil.copyfile(source, place)
    place.chmod(0o755)
