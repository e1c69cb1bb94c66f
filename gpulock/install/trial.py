# SPDX-License-Identifier: Apache-2.0
"""Trials: a program is run before it is put in force, as nobody where users are to run it.

TaskProlog runs as the user, so everything it needs must be everybody's to read: with an
interpreter below root's home every task of every job fails with 127.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Union

from gpulock.install.hooks import HookPaths, InstallError, hook_modules, run_program
from gpulock.sge.hook import TRIAL_JOB

SECONDS: Final = 15.0  # a hook that needs longer to refuse is not fit for use
_INTERPRETER_SECONDS: Final = 20.0  # for one that was never started here
_NOBODY: Final = 65534  # uid and gid, where the name is not known
Command = Sequence[Union[str, Path]]
_JOB: Final = {"JOB_ID": TRIAL_JOB}
NO_PROCESS: Final = str((1 << 22) + 1)  # no pid is so large (PID_MAX_LIMIT): nobody's parent
_REFUSES: Final = (1, 99, 100)  # ON_BROKEN, and 100 where limits cannot be lifted
_IMPORT: Final = """
import sys
sys.path[:0] = [sys.argv[1]]
for name in sys.argv[2:]:
    __import__(name)
    found = sys.modules[name].__file__
    if not found.startswith(sys.argv[1] + "/"):
        sys.exit(f"{name} comes from {found}")
"""
# Signs of another hook that hands out GPUs.
RIVALS: Final = ("CUDA_VISIBLE_DEVICES", "SGE_GPU", "lock-gpu", "gpuprolog", "gpu-prolog")


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
    more: dict[str, Any] = {}
    if as_nobody:
        try:
            entry = pwd.getpwnam("nobody")
            more = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": ()}
        except KeyError:
            more = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()}
    return run_program(command, seconds, env or {}, cwd="/", stdin=stdin, **more)


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


def self_test_sge_hooks(paths: HookPaths) -> None:
    """Start each hook as no shepherd would: it must refuse, in time; raise InstallError."""
    modules = [name.removesuffix(".py").replace("/", ".") for name in hook_modules()]
    modules = [name.removesuffix(".__init__") for name in modules]
    interpreter = paths.prolog.read_text().partition(" -IS\n")[0].removeprefix("#!")
    must = partial(try_hook, env=_JOB)
    must([interpreter, "-IS", "-c", _IMPORT, str(paths.library), *modules], (0,))
    must([paths.prolog, NO_PROCESS], _REFUSES, "not started by sge_shepherd")
    must([paths.epilog, NO_PROCESS], (0,), "not started by sge_shepherd")
    job = (TRIAL_JOB, "0", "queue")
    site = ("root", "own", "root@/bin/true")
    hostile = {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"}
    if paths.drop_env.exists():  # else no line of Grid Engine's may lead here
        for path, codes in ((paths.prolog, _REFUSES), (paths.epilog, (0,))):
            try_hook([paths.drop_env, path, *job], codes, "no shepherd", env=hostile)
            both = (*codes, 1)  # no spool directory, so no environment for a hook of the site's
            try_hook([paths.drop_env, path, *job, *site], both, "no shepherd", env=hostile)
    must([paths.sensor], (0,), stdin="quit\n")
    must([paths.jsv], (0,), "STARTED", stdin="START\nQUIT\n")


def try_slurm_hooks(paths: HookPaths) -> None:
    """Start each hook as no slurmd would: it must refuse, in time; raise InstallError.

    The one of a task is started as nobody, where root asks: that finds what users may not read.
    """
    for path in (paths.slurm_prolog, paths.slurm_task, paths.slurm_epilog):
        if why := why_users_cannot_run(path):
            raise InstallError(f"{why}; tasks run as their user, who must be able to")
    try_hook([paths.slurm_prolog], (1,), "SLURM_JOB_ID")
    try_hook([paths.slurm_epilog], (0,))
    fails, says = tuple(range(1, 256)), "not called as a TaskProlog"
    try_hook([paths.slurm_task], fails, says, as_nobody=os.geteuid() == 0)


def check_hook_interpreter(real: str) -> None:
    """Raise InstallError for an interpreter that users cannot run."""
    if why := why_users_cannot_run(Path(real)):
        raise InstallError(
            f"interpreter {why}: every task of every job would fail with 127; name a Python that"
            " all users may run (--interpreter /usr/bin/python3), or make gpulock's venv from one"
        )
    last = try_interpreter(real, ("-IS", "-c", "import os, sys, syslog"), _INTERPRETER_SECONDS)
    if last:
        raise InstallError(
            f"interpreter {real} does not run as nobody ({last}): users cannot read its library;"
            " name another (--interpreter /usr/bin/python3)"
        )


def command_program(site: str) -> Path:
    """Return the program of a site's command: `user@/path/program argument`."""
    word = site.split(maxsplit=1)[0]
    return Path(word.partition("@")[2] or word)


def rival_hook_reason(site: str) -> str:
    """Return why a site's hook looks as if it hands out GPUs itself, or nothing."""
    words = site.split()
    text = site
    for path in (command_program(site), *map(Path, words[1:])):
        try:
            if path.is_absolute() and path.is_file():
                text += path.read_bytes()[: 1 << 20].decode("utf-8", "replace")
        except OSError:
            continue
    found = [sign for sign in RIVALS if sign in text]
    return f"it names {found[0]}" if found else ""
