# SPDX-License-Identifier: Apache-2.0
"""Trials: a program is run before it is put in force, as nobody where users are to run it."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError

SECONDS: Final = 5.0  # a hook that needs longer to refuse is not fit for use
_NOBODY: Final = 65534  # uid and gid, where the name is not known
Command = Sequence[str | Path]


def try_hook(
    command: Command,
    codes: tuple[int, ...],
    words: str = "",
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    as_nobody: bool = False,
) -> None:
    """Run a hook without a job; raise InstallError unless it ends as it must, in its words."""
    name = " ".join(str(word) for word in command[:2]) + (" as nobody" if as_nobody else "")
    try:
        done = run_trial(command, SECONDS, stdin=stdin, env=env, as_nobody=as_nobody)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InstallError(f"self-test: {name}: {fault}") from fault
    said = " ".join((done.stderr + done.stdout).split())
    if done.returncode not in codes or words not in said:
        raise InstallError(f"self-test: {name} ended with {done.returncode}: {said[:300]!r}")


def try_interpreter(interpreter: str, words: Sequence[str], seconds: float) -> str:
    """Run an interpreter as a plain user would; return its last word, nothing where it did well.

    As nobody where root asks, else as we are. Raises InstallError where it cannot be run at all.
    """
    try:
        done = run_trial([interpreter, *words], seconds, as_nobody=os.geteuid() == 0)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InstallError(f"interpreter {interpreter} cannot be run as nobody: {fault}") from fault
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or ["?"])[-1]


def run_trial(
    command: Command,
    seconds: float,
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    as_nobody: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program with no environment but `env`; raise OSError or TimeoutExpired."""
    uid, gid = nobody_ids() if as_nobody else (None, None)
    return subprocess.run(
        command,
        env=env or {},
        cwd="/",
        user=uid,
        group=gid,
        extra_groups=() if as_nobody else None,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def nobody_ids() -> tuple[int, int]:
    """Return uid and gid of the user who may do least."""
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return _NOBODY, _NOBODY
    return entry.pw_uid, entry.pw_gid


def why_users_cannot_run(path: Path) -> str:
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
