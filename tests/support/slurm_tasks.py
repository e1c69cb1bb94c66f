# SPDX-License-Identifier: Apache-2.0
"""Where a TaskProlog runs: below the process that becomes the task, as the job's user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.slurm_site import REQUEUE_EXIT, STEPD, UID, Site

TWINS = ("APPTAINERENV_", "SINGULARITYENV_")
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "GPULOCK_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "GPULOCK_CDI",
    "GPULOCK_SHARE",
)


class Told:
    """What slurmstepd reads of one TaskProlog."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.lines = text.splitlines()
        assert text == "" or text.endswith("\n")
        pairs = [line.removeprefix("export ").partition("=") for line in self.of("export")]
        self.exported = {name: value for name, _, value in pairs}
        assert len(self.exported) == len(pairs)
        self.unset = {line.removeprefix("unset ") for line in self.of("unset")}
        self.printed = [line.removeprefix("print ") for line in self.of("print")]
        assert len(pairs) + len(self.unset) + len(self.printed) == len(self.lines)

    def of(self, word: str) -> list[str]:
        return [line for line in self.lines if line.startswith(f"{word} ")]

    @property
    def mask(self) -> str:
        """What CUDA sees, inside a container and outside."""
        found = {self.exported[f"{twin}CUDA_VISIBLE_DEVICES"] for twin in ("", *TWINS)}
        assert len(found) == 1
        return found.pop()


def stopped(told: Told, code: int = REQUEUE_EXIT) -> str:
    """Return why a task was stopped, which is all that it is told."""
    assert told.code == code
    assert (told.exported, told.unset, len(told.printed)) == ({}, set(), 1)
    assert told.printed[0].startswith("gpulock: ")
    return told.printed[0]


class TaskSite(Site):
    """A node on which we are the TaskProlog of alice, in step 0 of job 12."""

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]
    ) -> None:
        super().__init__(root)
        self._captured = captured
        patch.setattr(os, "getuid", lambda: UID)
        patch.setattr(os, "getppid", lambda: STEPD)
        self.stepd(STEPD, "12.0", UID)

    def run(self, **environ: str) -> Told:
        """Run the TaskProlog, which writes nothing to standard error."""
        self._captured.readouterr()
        code = self.task(**environ)
        told = self._captured.readouterr()
        assert told.err == ""
        return Told(code, told.out)
