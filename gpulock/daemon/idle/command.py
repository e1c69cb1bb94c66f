# SPDX-License-Identifier: Apache-2.0
"""What is done about a claim that idles: IDLE_COMMAND runs, or its job is ended.

Warm. The job ends through its own means (scancel, qdel, a signal to its process); its locks go
when it is gone, as every job's. IDLE_COMMAND is a site's program, started with facts that no user
can abuse, up to a deadline. No shell starts it, and its environment is ours. It must be root's as
a hook is: only root can replace it or what is on the way to it. The facts are words of letters,
digits and a few signs: a script that forgets its quotes is not led astray.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gpulock.daemon.core.sge_client import ask_qmaster
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.sge import spool
from gpulock.slurm.scontrol import SlurmctldClient, slurm_array_task_name, slurm_job_uid
from gpulock.store import atomic
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
    program = Path(path)
    if why := why_untrusted_program(program, (0, os.geteuid())):
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
        "TASK_ID": record.task_id or "1",
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


def terminate_idle_job(node: Node, record: Owner) -> str:
    """End the job that a claim is of; return what was done. Raises Refusal."""
    if record.scheduler == "slurm":
        return cancel_slurm_job(node, record)
    if record.scheduler == "sge":
        return delete_sge_job(node, record)
    if record.scheduler == "process":
        return terminate_claim_process(node, record)
    raise Refusal(UNKNOWN, f"cannot terminate {record.scheduler} claims", "see gpulock why")


def cancel_slurm_job(node: Node, record: Owner) -> str:
    """Cancel a Slurm job by the name that means this one task (facts/slurm.md, array tasks)."""
    control = SlurmctldClient(node.settings)
    found = control.job(record.job_id)
    if (
        found is None
        or slurm_job_uid(found) != record.uid
        or found["Restarts"] != str(record.restart)
    ):
        raise Refusal(UNKNOWN, "slurmctld knows another job of that id", "see squeue")
    name = slurm_array_task_name(found)
    if not control.do("scancel", name):
        raise Refusal(UNKNOWN, f"scancel {name} failed", "is slurmctld up?")
    return f"cancelled (scancel {name})"


def delete_sge_job(node: Node, record: Owner) -> str:
    """Delete a Grid Engine job, of an array the one task."""
    path = f"{record.spool_dir}/config"
    try:
        config = spool.parse_shepherd_config(atomic.read_text(path, spool.CONFIG_LIMIT))
    except OSError as fault:
        raise Refusal(UNKNOWN, f"{path}: {fault.strerror}", "is the job over?") from fault
    if config.get("job_id") != [record.job_id]:
        raise Refusal(UNKNOWN, f"{path} is of another job", "see qstat")
    words = [record.job_id]
    if config.get("ja_task_id", ["0"])[0] != "0":
        words += ["-t", record.task_id]
    ask_qmaster(node.settings, "qdel", *words)
    return f"deleted (qdel {' '.join(words)})"


def terminate_claim_process(node: Node, record: Owner) -> str:
    """Send SIGTERM to the process that holds the claim, and to no other that has its number."""
    fd = -1
    try:
        fd = os.pidfd_open(record.pid)
        if not node.proc.running(record.pid, record.start):
            raise ProcessLookupError
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    except (OSError, ValueError) as fault:
        raise Refusal(UNKNOWN, f"process {record.pid}: {fault}", "see gpulock why") from fault
    finally:
        if fd >= 0:
            os.close(fd)
    return f"sent SIGTERM to {record.pid}"
