# SPDX-License-Identifier: Apache-2.0
"""Trials: a program is run before it is put in force, as nobody where users are to run it.

TaskProlog runs as the user, so everything it needs must be everybody's to read: with an
interpreter below root's home every task of every job fails with 127.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Union

from gpulock.install.files import InstallError, run_program
from gpulock.install.hooks import HookPaths
from gpulock.sge.hook import TRIAL_JOB

SECONDS: Final = 15.0  # a hook that needs longer to refuse is not fit for use
_NOBODY: Final = 65534  # uid and gid
Command = Sequence[Union[str, Path]]
_JOB: Final = {"JOB_ID": TRIAL_JOB}
_HOSTILE: Final = {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"}
_REFUSES: Final = (1, 99, 100)  # ON_BROKEN, and 100 where limits cannot be lifted


def try_hook(
    command: Command,
    codes: Sequence[int],
    words: str = "",
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    as_nobody: bool = False,
) -> None:
    """Run a hook without a job; raise InstallError unless it ends as it must, in its words."""
    name = " ".join(str(word) for word in command[:2]) + (" as nobody" if as_nobody else "")
    user: dict[str, Any] = {}
    if as_nobody:
        user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()}
    do = f"self-test: {name}"
    done = run_program(command, SECONDS, env or {}, do, cwd="/", input=stdin, **user)
    said = " ".join((done.stderr + done.stdout).split())
    if done.returncode not in codes or words not in said:
        raise InstallError(f"{do} ended with {done.returncode}: {said[:300]!r}")


def try_sge_hooks(paths: HookPaths) -> None:
    """Start each hook as no shepherd would: it must refuse, in time; raise InstallError."""
    job, site = (TRIAL_JOB, "0", "queue"), ("root", "root@/bin/true")
    for path, codes in ((paths.prolog, _REFUSES), (paths.epilog, (0,))):
        try_hook([paths.drop_env, path, *job], codes, "no shepherd", env=_HOSTILE)
        both = (*codes, 1)  # no spool directory, so no environment for a hook of the site's
        try_hook([paths.drop_env, path, *job, *site], both, "no shepherd", env=_HOSTILE)
    try_hook([paths.sensor], (0,), stdin="quit\n", env=_JOB)


def try_slurm_hooks(paths: HookPaths) -> None:
    """Start each hook as no slurmd would: it must refuse, in time; raise InstallError.

    The one of a task is started as nobody, where root asks: that finds what users may not read.
    """
    try_hook([paths.slurm_prolog], (1,), "SLURM_JOB_ID")
    try_hook([paths.slurm_epilog], (0,))
    task, says = [paths.slurm_task], "not called as a TaskProlog"
    try:
        try_hook(task, range(1, 256), says, as_nobody=os.geteuid() == 0)
    except InstallError as fault:
        do = "tasks run as their user, who must reach hook, interpreter and settings"
        raise InstallError(f"{fault}: {do}") from fault
