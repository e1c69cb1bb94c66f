# SPDX-License-Identifier: Apache-2.0
"""A list of processes as gpulock's BPF iterator writes it, in a plain file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from struct import pack

from gpulock.node.process_list import END, FORMAT, NAME


def write_process_list(folder: Path, uids: Mapping[int, int], form: int = FORMAT) -> Path:
    """Write pids with their effective uids, and the end; return the file."""
    words = [word for pair in (*uids.items(), (END, form)) for word in pair]
    file = folder / NAME
    file.write_bytes(pack(f"{len(words)}I", *words))
    file.chmod(0o600)
    return file
