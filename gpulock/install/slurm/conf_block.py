# SPDX-License-Identifier: Apache-2.0
"""The block of `--write-conf` in slurm.conf: lines between two marks, at the head of the file.

The head, since a backslash at the end of what was the last line would take a line of the block,
and a file may lack its last end of line. Where a key stands matters only where it stands twice,
and that is refused. All is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.slurm.configured_hooks import EPILOG, PROLOG, TASK

BEGIN: Final = "# gpulock: begin (gpulock install slurm --write-conf)"
END: Final = "# gpulock: end"
_HOOKS: Final = {  # what the value of a hook of gpulock's ends in, whatever its prefix
    PROLOG: "/current/prolog/slurm",
    TASK: "/current/prolog/slurm-task",
    EPILOG: "/current/epilog/slurm",
}
_WORDS: Final = {"PrologFlags": "contain"}
_NUMBERS: Final = ("RequeueExit", "UsePAM")


@dataclass(frozen=True)
class SplitConf:
    """slurm.conf before, in and behind the block; `lines` is None where there is no block."""

    before: str
    lines: tuple[str, ...] | None
    after: str

    @property
    def rest(self) -> str:
        """The file without the block."""
        return self.before + self.after

    def with_lines(self, lines: Sequence[str]) -> str:
        """Return the file with a block of these lines, without one where there are none."""
        block = "".join(f"{line}\n" for line in (BEGIN, *lines, END)) if lines else ""
        return f"{self.before}{block}{self.after}"


def split_slurm_conf(path: Path, text: str) -> SplitConf:
    """Return a file with its block; raise InstallError where a person changed the marks."""
    lines = text.splitlines(keepends=True)
    bare = [line.rstrip("\r\n") for line in lines]
    marks = [number for number, line in enumerate(bare) if line in (BEGIN, END)]
    if not marks:
        return SplitConf("", None, text)
    if [bare[number] for number in marks] != [BEGIN, END]:
        raise InstallError(
            f"{path} has not one pair of gpulock's marks: take out all lines that begin with"
            " `# gpulock: ` and what stands between them by hand"
        )
    first, last = marks
    if first and bare[first - 1].endswith("\\"):
        raise InstallError(
            f"{path}: the line above gpulock's block ends in a backslash: take it out"
        )
    return SplitConf(
        "".join(lines[:first]), tuple(bare[first + 1 : last]), "".join(lines[last + 1 :])
    )


def check_block(path: Path, lines: Sequence[str]) -> None:
    """Raise InstallError where somebody wrote into the block: it would be lost."""
    if strange := [line for line in lines if not is_gpulock_line(line)]:
        raise InstallError(
            f"{path}: gpulock's block has a line of the site's ({strange[0].strip()}): move it out"
            " of the block",
        )


def is_gpulock_line(line: str) -> bool:
    """Return whether gpulock may have written a line."""
    key, equals, value = line.partition("=")
    if not equals or value != value.strip():
        return False
    if key in _HOOKS:
        return value.endswith(_HOOKS[key]) and " " not in value
    return (key in _NUMBERS and value.isdigit()) or _WORDS.get(key) == value.lower()
