# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks below the common link, tried before they are in force.

TaskProlog runs as the user, so everything it needs must be everybody's to read: with an
interpreter below root's home every task of every job fails with 127.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths, InstallError, make_folder, render_hooks
from gpulock.install.versions import Hooks, check_folder

_SECONDS: Final = 5.0
_NOBODY: Final = 65534  # uid and gid, where the name is not known


@dataclass(frozen=True)
class SlurmHooks(Hooks):
    """The hooks in force, as for Grid Engine; Slurm's are tried as well before the swap."""

    def write(self, value: str | None) -> None:
        """Install a version and put it in force, or take all away; raise InstallError."""
        if value is not None and value == self.wanted():
            make_folder(self.prefix)
            check_folder(self.prefix)
            try_hooks(render_hooks(self.prefix / value, self.config, self.interpreter))
        super().write(value)


def try_hooks(paths: HookPaths) -> None:
    """Start each hook as no slurmd would: it must refuse, in time; raise InstallError.

    The one of a task is started as nobody, where root asks: that finds what users may not read.
    """
    for path in (paths.slurm_prolog, paths.slurm_task, paths.slurm_epilog):
        if why := why_private(path):
            raise InstallError(f"{why}; tasks run as their user, who must be able to")
    _try([paths.slurm_prolog], (1,), "SLURM_JOB_ID")
    _try([paths.slurm_epilog], (0,), "")
    try_task(paths.slurm_task)


def try_task(path: Path) -> None:
    """Start a TaskProlog as a user who is nobody; raise InstallError unless it refuses."""
    _try([path], tuple(range(1, 256)), "not called as a TaskProlog", as_nobody=os.geteuid() == 0)


def _try(
    command: Sequence[str | Path], codes: tuple[int, ...], words: str, as_nobody: bool = False
) -> None:
    """Run a hook without any environment; raise InstallError unless it does as it must."""
    who = " as nobody" if as_nobody else ""
    uid, gid = nobody() if as_nobody else (None, None)
    try:
        done = subprocess.run(
            command,
            env={},
            cwd="/",
            user=uid,
            group=gid,
            extra_groups=() if as_nobody else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InstallError(f"self-test: {command[0]}{who}: {fault}") from fault
    said = " ".join((done.stderr + done.stdout).split())
    if done.returncode not in codes or words not in said:
        raise InstallError(
            f"self-test: {command[0]}{who} ended with {done.returncode}: {said[:300]!r}"
        )


def nobody() -> tuple[int, int]:
    """Return uid and gid of the user who may do least."""
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return _NOBODY, _NOBODY
    return entry.pw_uid, entry.pw_gid


def why_private(path: Path) -> str:
    """Return what keeps a plain user from running a program, or nothing.

    Looks at the bits of the real file and of every folder above it, links resolved.
    """
    try:
        real = path.resolve(strict=True)
        for folder in reversed(real.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return f"{real}: users may not enter {folder}"
        mode = real.stat().st_mode
    except OSError as fault:
        return f"{path}: {fault.strerror}"
    if not mode & stat.S_IROTH or not mode & stat.S_IXOTH:
        return f"{real} has mode {stat.S_IMODE(mode):04o}: users may not run it"
    return ""


def check_interpreter(real: str) -> None:
    """Raise InstallError for an interpreter that users cannot run."""
    if why := why_private(Path(real)):
        raise InstallError(
            f"interpreter {why}: every task of every job would fail with 127; name a Python that"
            " all users may run (--interpreter /usr/bin/python3), or make gpulock's venv from one"
        )
    uid, gid = nobody() if os.geteuid() == 0 else (None, None)
    try:
        done = subprocess.run(
            [real, "-IS", "-c", "import os, sys, syslog"],
            env={},
            cwd="/",
            user=uid,
            group=gid,
            extra_groups=() if uid is not None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InstallError(f"interpreter {real} cannot be run as nobody: {fault}") from fault
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise InstallError(
            f"interpreter {real} does not run as nobody ({last}): users cannot read its library;"
            " name another (--interpreter /usr/bin/python3)"
        )
