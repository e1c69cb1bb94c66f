# SPDX-License-Identifier: Apache-2.0
"""IDLE_COMMAND: a site's program, started with facts that no user can abuse, up to a deadline.

Warm. No shell starts it, and its environment is ours. It must be root's as a hook is: only root
can replace it or what is on the way to it. The facts are words of letters, digits and a few signs:
a script that forgets its quotes is not led astray.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from typing import Final

from gpulock.node.context import Node
from gpulock.store.owner import Owner

SECONDS: Final = 30.0  # for a command to end
WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@,+/-]*")
LONGEST: Final = 256  # characters of a fact, but for lists of devices


class IdleCommand:
    """A command that runs since `now` (CLOCK_BOOTTIME); it leads a session of its own."""

    def __init__(self, path: str, environ: dict[str, str], now: float) -> None:
        """Start it; raise OSError."""
        self._path = path
        self._end = now + SECONDS
        self._who = f"about {environ['GPULOCK_JOB']}"
        null = os.devnull
        self.pid = os.posix_spawn(
            path,
            [path, environ["GPULOCK_EVENT"]],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )

    def poll(self, now: float) -> str | None:
        """Return None while it runs, then why it failed, or nothing; end it at its deadline."""
        try:
            done, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return ""  # somebody else in this process has asked
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"IDLE_COMMAND {self._path} {self._who} ended with {code}" if code else ""
        if now < self._end:
            return None
        self.kill()
        return f"IDLE_COMMAND {self._path} {self._who} was ended after {SECONDS:.0f} s"

    def kill(self) -> None:
        """End it and all that it started in its session's group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError, PermissionError):
            return


def check_program_trust(path: str) -> str:
    """Return why a program is not run, or nothing: who else than root could have written it."""
    if not path.startswith("/"):
        return "it is not an absolute path"
    real = os.path.realpath(path)
    place = real
    try:
        while True:
            info = os.stat(place)
            sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
            if info.st_uid not in (0, os.geteuid()):
                return f"{place} belongs to uid {info.st_uid}"
            if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
                return f"{place} is writable by others than its owner"
            if place == "/":
                break
            place = os.path.dirname(place)
        info = os.stat(real)
    except OSError as fault:
        return f"{place}: {fault.strerror}"
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & stat.S_IXUSR:
        return f"{real} is no program"
    return ""


def build_idle_environment(
    node: Node, record: Owner, devices: tuple[str, ...], seconds: float, event: str, now: float
) -> dict[str, str]:
    """Return the whole environment of the command: what it is to know."""
    settings = node.settings
    facts = {
        "EVENT": event,
        "NODE": record.slurmd or record.node,
        "SCHEDULER": record.scheduler,
        "CLUSTER": record.cluster,
        "JOB": f"{record.scheduler}:{record.job_id}.{record.task_id or '1'}",
        "JOB_ID": record.job_id,
        "TASK_ID": record.task_id,
        "USER": record.user,
        "UID": str(record.uid),
        "QUEUE": record.queue,
        "DEVICES": ",".join(devices),
        "IDLE_SECONDS": f"{seconds:.0f}",
        "HELD_SECONDS": f"{max(0.0, now - record.claimed_boottime):.0f}",
        "WARN_SECONDS": f"{settings.idle_warn:.0f}",
        "KILL_SECONDS": f"{settings.idle_kill:.0f}",
    }
    pairs = {
        f"GPULOCK_{key}": value if key == "DEVICES" or is_safe_shell_word(value) else ""
        for key, value in facts.items()
    }
    return {"PATH": "/usr/bin:/bin", **pairs}


def is_safe_shell_word(text: str) -> bool:
    """Return whether a text is one word to any shell, and no option of any program."""
    return len(text) <= LONGEST and WORD.fullmatch(text) is not None
