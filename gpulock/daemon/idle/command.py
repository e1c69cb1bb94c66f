# SPDX-License-Identifier: Apache-2.0
"""IDLE_COMMAND: what a site does about a claim that idles or ends soon.

Warm. It is started with facts that no user can abuse, up to a deadline. No shell starts it, and
its environment is ours. It must be root's as a hook is: only root can replace it or what is on the
way to it. The facts are words of letters, digits and a few signs: a script that forgets its quotes
is not led astray.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from gpulock.daemon.core.sge_client import client_folders, sge_environment
from gpulock.daemon.reconcile.report_messages import describe_lock_owner
from gpulock.node.settings import Settings
from gpulock.store.owner import Owner

SECONDS: Final = 30.0  # for a command to end
WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@,+/-]*")
FACT_CHARACTERS: Final = 256  # characters of a fact, but for lists of devices


class ClaimFacts(NamedTuple):
    """What IDLE_COMMAND is told of a claim; it idles since `seconds`, as far as observed."""

    owner: Owner
    devices: tuple[str, ...]
    seconds: float
    alive: bool

    def describe(self) -> str:
        """Return what idles, of whom, and for how long."""
        what = f"{','.join(self.devices)}{describe_lock_owner(self.owner)}"
        return f"{what} idle for {self.seconds:.0f} observed seconds"


class IdleCommand:
    """A command that runs since `now` (CLOCK_BOOTTIME); it leads a session of its own."""

    def __init__(self, settings: Settings, claim: ClaimFacts, event: str, now: float) -> None:
        """Start it; raise OSError, also for one that others could have written."""
        self.claim = claim
        self.event = event
        path = settings.idle_command
        if fault := check_program_trust(path, os.geteuid()):
            raise OSError(errno.EACCES, fault)
        environ = build_idle_environment(settings, claim, event, now)
        self._what = f"IDLE_COMMAND {path} {event} about {environ['GPULOCK_JOB']}"
        self._end = now + SECONDS
        self._process = subprocess.Popen(
            [path, event],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def poll(self, now: float) -> str | None:
        """Return None while it runs, then why it failed, or nothing; end it at its deadline."""
        code = self._process.poll()
        if code is not None:
            return f"{self._what} ended with {code}" if code else ""
        if now < self._end:
            return None
        self.kill()
        return f"{self._what} was ended after {SECONDS:.0f} s"

    def kill(self) -> None:
        """End it and all that it started in its session's group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


def check_program_trust(path: str, runner: int) -> str:
    """Return why a uid does not run a program, or nothing: who else but root could write it."""
    program = Path(path)
    if why := why_untrusted_program(program, (0, runner)):
        return why
    return "" if program.is_file() and program.stat().st_mode & stat.S_IXUSR else "it is no program"


def why_untrusted_program(path: Path, owners: Collection[int]) -> str:
    """Return who else than `owners` could have put a program there, as a clause, or nothing.

    Looks at the file, at the folders and links that lead to it, and at all that these lead to. A
    sticky folder (/tmp) lets others add, not replace.
    """
    ways, seen = [path.absolute()], set[Path]()
    try:
        while ways:
            way = ways.pop()
            for place in [one for one in (way, *way.parents) if one not in seen]:
                info = place.lstat()
                link, folder = stat.S_ISLNK(info.st_mode), stat.S_ISDIR(info.st_mode)
                if info.st_uid not in owners:
                    return f"{place} belongs to uid {info.st_uid}"
                sticky = folder and info.st_mode & stat.S_ISVTX
                if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (sticky or link):
                    return f"{place} is writable by others (mode {stat.S_IMODE(info.st_mode):04o})"
                if link:
                    ways.append(place.parent / place.readlink())
                seen.add(place)
        path.stat()  # links in a circle lead nowhere
    except OSError as fault:
        return f"{path}: {fault.strerror}"
    return ""


def build_idle_environment(
    settings: Settings, claim: ClaimFacts, event: str, now: float
) -> dict[str, str]:
    """Return the whole environment of the command: what it is to know, and its schedulers."""
    record = claim.owner
    facts = {
        "EVENT": event,
        "NODE": record.slurmd or record.node,
        "SCHEDULER": record.scheduler,
        "CLUSTER": record.cluster,
        "JOB": f"{record.scheduler}:{record.job_id}.{record.task_id or '1'}",
        "JOB_ID": record.job_id,
        "TASK_ID": record.task_id,
        "RESTART": str(record.restart),
        "PID": str(record.pid),
        "START": str(record.start),
        "USER": record.user,
        "UID": str(record.uid),
        "QUEUE": record.queue,
        "DEVICES": ",".join(claim.devices),
        "IDLE_SECONDS": f"{claim.seconds:.0f}",
        "HELD_SECONDS": f"{max(0.0, now - record.claimed_boottime):.0f}",
        "WARN_SECONDS": f"{settings.idle_warn:.0f}",
        "KILL_SECONDS": f"{settings.idle_kill:.0f}",
    }
    pairs = {
        f"GPULOCK_{key}": value if key == "DEVICES" or is_safe_shell_word(value) else ""
        for key, value in facts.items()
    }
    return {**scheduler_environment(settings), **pairs}


def scheduler_environment(settings: Settings) -> dict[str, str]:
    """Return with what the schedulers' own programs are found, and find their controllers."""
    path = ":".join([settings.slurm_binaries, *client_folders(settings), "/usr/bin:/bin"])
    slurm = {"SLURM_CONF": settings.slurm_conf} if settings.slurm_conf else {}
    return {"PATH": path, **slurm, **sge_environment(settings)}


def is_safe_shell_word(text: str) -> bool:
    """Return whether a text is one word to any shell, and no option of any program."""
    return len(text) <= FACT_CHARACTERS and WORD.fullmatch(text) is not None
