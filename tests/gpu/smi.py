# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says: asked for the fields that this release of it knows, and read.

A field that it does not know makes it refuse the whole question, so it is asked first which there
are. A card that does not have a thing says so in brackets: `[N/A]`, `[Not Supported]`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence

PATIENCE = 30.0  # seconds: without persistence mode it initialises each card
UUID = "uuid"
PROCESSES = "processes"  # no field of its own: how many processes compute on the card
_NAMES = re.compile(r'^"([^"]+)"(?: or "([^"]+)")?', re.MULTILINE)
_WORDS = {
    **{"yes": 1.0, "no": 0.0, "active": 1.0, "not active": 0.0},
    # nvmlDeviceGpuRecoveryAction_t of nvml.h, as nvidia-smi words it
    **{"none": 0.0, "reset": 1.0, "gpu reset": 1.0, "reboot": 2.0, "node reboot": 2.0},
    **{"drain p2p": 3.0, "drain and reset": 4.0},
}
Rows = dict[str, dict[str, str]]  # the text of each field, by UUID


class SmiError(RuntimeError):
    """nvidia-smi could not be asked; the message is its own words."""


class Smi:
    """The program `command`."""

    def __init__(self, command: str) -> None:
        self._command = command

    def run(self, *words: str) -> str:
        """Return what it prints; raise SmiError."""
        try:
            done = subprocess.run(
                [self._command, *words],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=PATIENCE,
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise SmiError(str(fault)) from fault
        if done.returncode:
            said = (done.stderr or done.stdout).strip().replace("\n", " ")
            raise SmiError(f"{self._command} {' '.join(words)}: {done.returncode}, {said}")
        return done.stdout

    def known(self, wanted: Iterable[str]) -> list[str]:
        """Return those of the fields that it can be asked for."""
        names = parse_names(self.run("--help-query-gpu"))
        return [field for field in wanted if field in names]

    def ask(self, fields: Sequence[str]) -> Rows:
        """Ask for fields of all cards, and how many processes compute on each."""
        columns = [UUID, *fields]
        text = self.run(f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits")
        apps = self.run("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits")
        pairs = {tuple(line.replace(" ", "").split(",")) for line in apps.splitlines()}
        rows = parse_rows(text, columns)
        for uuid, row in rows.items():
            row[PROCESSES] = str(sum(pair[0] == uuid for pair in pairs))
        return rows


def parse_names(text: str) -> frozenset[str]:
    """Return the fields that `--help-query-gpu` names, with their other names."""
    return frozenset(name for pair in _NAMES.findall(text) for name in pair if name)


def parse_rows(text: str, columns: Sequence[str]) -> Rows:
    """Return the fields by UUID; raise SmiError where a row has not as many as were asked for."""
    rows: Rows = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(columns):
            raise SmiError(f"{len(values)} values for {len(columns)} fields: {line!r}")
        row = dict(zip(columns, values))
        rows[row[UUID]] = row
    return rows


def is_absent(text: str) -> bool:
    """Return whether the card is said not to have it, or the question to be out of use."""
    return text.startswith("[") or text in {"", "N/A"}


def parse_number(text: str) -> float | None:
    """Return what a field says as a number, None where it is none: a bit mask is one."""
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return float(int(text, 16)) if word.startswith("0x") else float(text)
    except ValueError:
        return None
