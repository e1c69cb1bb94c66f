# SPDX-License-Identifier: Apache-2.0
"""A job of one GPU after an installation: it prints its environment, and so what gpulock gave it.

The real scheduler is asked, as by a user. A job that does not start in time is withdrawn, and what
the scheduler says of it is returned. The job is of the administrator who called sudo, else root's.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpulock.install.hooks import InstallError
from gpulock.store import atomic

if TYPE_CHECKING:
    from gpulock.install.sge.qconf import Qconf

SECONDS: Final = 60.0
_NAME: Final = "gpulock-trial"
_PROGRAM: Final = "/usr/bin/env"
_PAUSE: Final = 0.5
_OUTPUT: Final = 1 << 20  # bytes: what execve(2) takes of an environment is seldom more
_REASONS: Final = 3  # that are shown of those that a scheduler has


class TrialJobError(InstallError):
    """Say that a trial job ran without its GPU, or that its scheduler put it in error."""


def judge_trial_output(job: str, text: str) -> str:
    """Return what the environment of a job says; raise TrialJobError for one without its GPU."""
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    mask = shown.get("CUDA_VISIBLE_DEVICES", "")
    if not mask or "CUDA_DEVICE_ORDER" not in shown:  # Slurm sets the mask alone
        raise TrialJobError(f"{job} ran, and gpulock gave it no GPU: run gpulock doctor")
    return f"{job} ran with CUDA_VISIBLE_DEVICES={mask}"


def trial_owner() -> dict[str, Any]:
    """Return whose the job is, as subprocess is told."""
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() or not (uid.isdigit() and gid.isdigit()) or uid == "0":
        return {}
    return {"user": int(uid), "group": int(gid), "extra_groups": ()}


def run_sge_trial(qconf: Qconf, where: str, complex_: str, seconds: float = SECONDS) -> str:
    """Run a job in `gpu.q@node1`; return what came of it; raise TrialJobError.

    Its output is read here, so the queue is one of this host.
    """
    owner = trial_owner()
    with tempfile.TemporaryDirectory(prefix=f"{_NAME}-") as folder:
        if owner:
            os.chown(folder, owner["user"], owner["group"])
        out = Path(folder, "out")
        words = ("-clear", "-terse", "-N", _NAME, "-q", where, "-l", f"{complex_}=1", "-r", "n")
        streams = ("-j", "y", "-o", str(out), "-shell", "n", "-b", "y", _PROGRAM)
        try:
            number = qconf.run("qsub", *words, *streams, **owner).strip()
        except InstallError as fault:
            try_it = f"qsub -q {where} -l {complex_}=1 -b y -j y {_PROGRAM}"
            return f"no trial job: {fault}; as a user, {try_it}"
        job = f"trial job {number}"
        try:
            why = wait_for_sge_job(qconf, number, seconds)
        except BaseException:
            with contextlib.suppress(InstallError):  # the first fault is the one to tell
                qconf.run("qdel", number)
            raise
        if why:
            qconf.run("qdel", number)
            return f"{job} was withdrawn: not over after {seconds:.0f} s ({why})"
        return judge_trial_output(job, read_trial_output(job, str(out)))


def read_trial_output(job: str, path: str) -> str:
    """Return what a job printed, nothing where it printed nothing; raise TrialJobError.

    The folder is the job's user's, who may have put anything there.
    """
    try:
        return atomic.read_file(path, _OUTPUT).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as fault:
        raise TrialJobError(f"{job} ran, and its output cannot be read: {fault}") from fault


def wait_for_sge_job(qconf: Qconf, number: str, seconds: float) -> str:
    """Return nothing once a job is over, or why it is not; raise TrialJobError, InstallError."""
    deadline = time.monotonic() + seconds
    while shown := show_sge_job(qconf, number):
        reasons = sge_job_reasons(shown)
        if failed := [text for name, text in reasons if name == "error"]:
            raise TrialJobError(f"trial job {number} failed: {failed[0]}")
        if time.monotonic() > deadline:
            return "; ".join(text for _, text in reasons[:_REASONS]) or "qstat says no reason"
        time.sleep(_PAUSE)
    return ""


def show_sge_job(qconf: Qconf, number: str) -> str:
    """Return what qstat shows of a job, nothing for one that is over; raise InstallError."""
    try:
        return qconf.run("qstat", "-j", number)
    except InstallError as fault:
        if "do not exist" in str(fault):
            return ""
        raise


def sge_job_reasons(shown: str) -> list[tuple[str, str]]:
    """Return ("error" or "waits", reason) as `qstat -j` shows them; pure."""
    errors = re.findall(r"(?m)^error reason\s+\d+:\s*(.*\S)", shown)
    _, _, behind = shown.partition("\nscheduling info:")
    waits = [line.strip() for line in behind.splitlines() if line.strip()]
    return [("error", text) for text in errors] + [("waits", text) for text in waits]
