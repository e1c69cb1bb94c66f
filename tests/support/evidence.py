# SPDX-License-Identifier: Apache-2.0
"""What the labs that are up say of themselves, for the text of a failure and for its folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

TAIL: Final = 12  # lines of each log in a failure's text; the folder has the whole
HEAD: Final = 3000  # characters of what a tool says there


class LabError(RuntimeError):
    """The lab could not do what was asked of it; the message says why, with the daemons' words."""


class Witness(Protocol):
    """A lab, or a part of one, that can say what its state is."""

    @property
    def name(self) -> str:
        """Return what a folder of its evidence is called."""
        ...

    def evidence(self) -> Mapping[str, str]:
        """Return what each of its tools says now, such as qstat, by the tool's name."""
        ...

    def log_files(self) -> Iterable[Path]:
        """Return its logs, of which some may not be there yet."""
        ...


_witnesses: Final[list[Witness]] = []


def watch(witness: Witness) -> None:
    """Let a lab be heard from now on, whenever a test fails."""
    if witness not in _witnesses:
        _witnesses.append(witness)


def unwatch(witness: Witness) -> None:
    """Hear a lab no longer, because it is down."""
    if witness in _witnesses:
        _witnesses.remove(witness)


def is_watched() -> bool:
    """Return whether a lab is up."""
    return bool(_witnesses)


def log_sizes() -> dict[Path, int]:
    """Return the size of every log: one that grows shows that a lab is at work."""
    sizes: dict[Path, int] = {}
    for path in (path for witness in _witnesses for path in witness.log_files()):
        with contextlib.suppress(OSError):
            sizes[path] = path.stat().st_size
    return sizes


def describe() -> str:
    """Return the state of every lab and the end of its logs."""
    parts: list[str] = []
    for witness in _witnesses:
        said = _state(witness).items()
        parts += [f"--- {witness.name}: {tool}\n{text[:HEAD]}" for tool, text in said]
        for path in witness.log_files():
            lines = _read(path).splitlines()[-TAIL:]
            name = f"{path.parent.name}/{path.name}"
            parts.append("\n".join([f"--- {witness.name}: {name}", *lines]))
    return "\n".join(parts)


def keep(folder: Path) -> bool:
    """Write the state of every lab and its whole logs into a folder; say whether there are any."""
    shutil.rmtree(folder, ignore_errors=True)
    for witness in _witnesses:
        place = folder / witness.name
        place.mkdir(parents=True)
        for tool, text in _state(witness).items():
            (place / f"{tool}.txt").write_text(text, errors="surrogateescape")
        for number, path in enumerate(witness.log_files()):
            text = _read(path)
            (place / f"{number:02}-{path.parent.name}-{path.name}").write_text(text)
    return bool(_witnesses)


def _state(witness: Witness) -> Mapping[str, str]:
    """Return what a lab says; a tool that cannot answer hides no other failure."""
    try:
        return witness.evidence()
    except (LabError, OSError, subprocess.SubprocessError) as fault:
        return {"state": f"it cannot be asked: {fault}"}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as fault:
        return f"({fault.strerror})"
