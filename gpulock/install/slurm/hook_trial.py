# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks below the common link, tried before they are in force.

TaskProlog runs as the user, so everything it needs must be everybody's to read: with an
interpreter below root's home every task of every job fails with 127.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths, InstallError, make_public_folder, render_hooks
from gpulock.install.trial import try_hook, try_interpreter, why_users_cannot_run
from gpulock.install.versions import InstalledHooks, check_prefix_owner

_SECONDS: Final = 20.0  # for an interpreter that was never started here


@dataclass(frozen=True)
class SlurmHooks(InstalledHooks):
    """The hooks in force, as for Grid Engine; Slurm's are tried as well before the swap."""

    def write(self, value: str | None) -> None:
        """Install a version and put it in force, or take all away; raise InstallError."""
        if value is not None and value == self.wanted():
            make_public_folder(self.prefix)
            check_prefix_owner(self.prefix)
            try_slurm_hooks(render_hooks(self.prefix / value, self.config, self.interpreter))
        super().write(value)


def try_slurm_hooks(paths: HookPaths) -> None:
    """Start each hook as no slurmd would: it must refuse, in time; raise InstallError.

    The one of a task is started as nobody, where root asks: that finds what users may not read.
    """
    for path in (paths.slurm_prolog, paths.slurm_task, paths.slurm_epilog):
        if why := why_users_cannot_run(path):
            raise InstallError(f"{why}; tasks run as their user, who must be able to")
    try_hook([paths.slurm_prolog], (1,), "SLURM_JOB_ID")
    try_hook([paths.slurm_epilog], (0,))
    try_task_prolog(paths.slurm_task)


def try_task_prolog(path: Path) -> None:
    """Start a TaskProlog as a user who is nobody; raise InstallError unless it refuses."""
    fails, says = tuple(range(1, 256)), "not called as a TaskProlog"
    try_hook([path], fails, says, as_nobody=os.geteuid() == 0)


def check_hook_interpreter(real: str) -> None:
    """Raise InstallError for an interpreter that users cannot run."""
    if why := why_users_cannot_run(Path(real)):
        raise InstallError(
            f"interpreter {why}: every task of every job would fail with 127; name a Python that"
            " all users may run (--interpreter /usr/bin/python3), or make gpulock's venv from one"
        )
    last = try_interpreter(real, ("-IS", "-c", "import os, sys, syslog"), _SECONDS)
    if last:
        raise InstallError(
            f"interpreter {real} does not run as nobody ({last}): users cannot read its library;"
            " name another (--interpreter /usr/bin/python3)"
        )
