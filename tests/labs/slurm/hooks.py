# SPDX-License-Identifier: Apache-2.0
"""Hooks of the Slurm lab that can be stopped before and after the real one, or leave it out."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.labs.common.installed import script
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId, Slurm
from tests.support.wait import wait_until

When = Literal["before", "after", "instead"]
Hook = Literal["Prolog", "TaskProlog", "Epilog"]

# Prolog and Epilog have no PATH: nothing is run that the shell does not bring, but sleep and env.
_AROUND: Final = """#!/bin/sh
here={folder}/{name}.$SLURMD_NODENAME
stop() {{
    [ -e "$here.$1" ] || return 1
    echo $$ >"$here.$1.$SLURM_JOB_ID"
    while [ -e "$here.$1" ]; do /bin/sleep 0.05; done
}}
/usr/bin/env >"$here.environ.$SLURM_JOB_ID"
stop before
stop instead && exit 0
{hook}
code=$?
stop after
exit $code
"""


@dataclass(frozen=True)
class Stops:
    """Where the hooks of a lab stop as long as a file is there; all of them, until told."""

    slurm: Slurm
    folder: Path
    hooks: dict[str, str | Path]

    def set(self, hook: Hook, node: str, when: When) -> None:
        """Let a hook on a node wait before or after the real one, or instead of it."""
        self._file(hook, node, when).touch()

    def go(self, hook: Hook, node: str, when: When) -> None:
        """Let a hook that waits go on, and the next ones not wait."""
        self._file(hook, node, when).unlink()

    def wait(self, hook: Hook, node: str, when: When, job: JobId) -> int:
        """Wait until a job's hook has stopped; return its pid.

        When its Epilog has, the job's steps are over, and their daemons gone as well. When its
        Prolog has, slurmd has taken the script: else a slurmd that is killed has never had the job.
        """
        place = Path(f"{self._file(hook, node, when)}.{job}")
        said = wait_until(
            lambda: text if place.exists() and (text := place.read_text()).endswith("\n") else None,
            why=f"the {hook} of job {job} on {node} to stop {when}",
        )
        if hook == "Epilog":
            self.slurm.wait_stepless(job, node)
        if hook == "Prolog":
            self.slurm.wait_logged(node, job, "Waiting for {} prolog to complete")
        return int(said)

    def environ(self, hook: Hook, node: str, job: JobId) -> dict[str, str]:
        """Return the environment that a job's hook had."""
        text = Path(f"{self._file(hook, node, 'environ')}.{job}").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def has_run(self, hook: Hook, node: str, job: JobId) -> bool:
        """Return whether a job's hook was started."""
        return Path(f"{self._file(hook, node, 'environ')}.{job}").exists()

    def _file(self, hook: str, node: str, what: str) -> Path:
        return self.folder / f"{hook}.{node}.{what}"


def stops(gpus: Gpulock) -> Stops:
    """Return the hooks of a lab, none stopped; `hooks` is for the lab's setup."""
    folder = gpus.slurm.lab / "stops"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chmod(folder, 0o777)  # a TaskProlog is the user's
    hooks: dict[str, str | Path] = {
        name: script(gpus, name, _AROUND.format(folder=folder, name=name, hook=hook))
        for name, hook in gpus.setup.hooks.items()
    }
    return Stops(gpus.slurm, folder, hooks)


def leak(hooks: Stops, node: str, *jobs: JobId) -> None:
    """Cancel jobs whose Epilog does not run."""
    hooks.set("Epilog", node, "instead")
    hooks.slurm.scancel(*jobs)
    for job in jobs:
        hooks.wait("Epilog", node, "instead", job)
    hooks.go("Epilog", node, "instead")
    for job in jobs:
        hooks.slurm.wait_done(job)
