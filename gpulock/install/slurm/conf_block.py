# SPDX-License-Identifier: Apache-2.0
"""The block of `--write-conf` in slurm.conf: lines between two marks, at the head of the file.

The head, since a backslash at the end of what was the last line would take a line of the block,
and a file may lack its last end of line. Where a key stands matters only where it stands twice,
and that is refused. The second mark has a sum of the lines: what somebody wrote into the block is
no more gpulock's to replace. All is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError

BEGIN: Final = "# gpulock: begin (gpulock install slurm --write-conf)"
END: Final = "# gpulock: end "


def block_lines(lines: Sequence[str]) -> list[str]:
    """Return a block with its marks, nothing where it has no line."""
    total = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return [BEGIN, *lines, f"{END}{total}"] if lines else []


@dataclass(frozen=True)
class SplitConf:
    """The block's lines in slurm.conf, None where there is none, and the file without it."""

    lines: tuple[str, ...] | None
    rest: str

    def with_lines(self, lines: Sequence[str]) -> str:
        """Return the file with a block of these lines, without one where there are none."""
        return "".join(f"{line}\n" for line in block_lines(lines)) + self.rest


def split_slurm_conf(path: Path, text: str) -> SplitConf:
    """Return a file with its block; raise InstallError where a person changed it."""
    lines = text.splitlines(keepends=True)
    bare = [line.rstrip("\r\n") for line in lines]
    marks = [n for n, line in enumerate(bare) if line == BEGIN or line.startswith(END)]
    if not marks:
        return SplitConf(None, text)
    first, last = marks[0], marks[-1]
    block = tuple(bare[first + 1 : last])
    if block_lines(block) != bare[first : last + 1]:
        raise InstallError(
            f"{path}: somebody changed gpulock's block: put it back, or take out by hand what"
            f" stands from `{BEGIN}` to `{END.strip()} ...`, and run it again"
        )
    if first and bare[first - 1].endswith("\\"):
        raise InstallError(
            f"{path}: the line above gpulock's block ends in a backslash: take it out"
        )
    return SplitConf(block, "".join(lines[:first] + lines[last + 1 :]))
