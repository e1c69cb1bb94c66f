# SPDX-License-Identifier: Apache-2.0
"""The shepherd above a hook and its spool directory: the only things a hook believes.

Hot. The directory is opened once, through /proc/SHEPHERD/cwd, and everything is read relative to
that descriptor. Nothing is taken from the environment, which a job's owner wrote. `config` holds
values of the owner's too (arguments with newlines make lines of their own, seen in 8.1.9), so a
key that stands there twice is a forgery, whether or not the job asks for GPUs.
"""

import errno
import os
import stat
import time

from gpulock.deadline import Deadline
from gpulock.errors import (
    BROKEN,
    INVALID_REQUEST,
    UNKNOWN,
    Refusal,
    one_line,
    shorten,
)
from gpulock.node.procfs import Proc
from gpulock.store import atomic
from gpulock.store.kv import DIGITS

SHEPHERD_NAME = "sge_shepherd"
OWNER_SECONDS = 5.0  # until a shepherd has its admin user's uid again
OWNER_PAUSE = 0.001  # seconds
ACTIVE_JOBS = "/active_jobs/"  # in the path of each shepherd's directory (sge_execd(8))
CONFIG_LIMIT = 1 << 22  # bytes: job arguments stand in it
JOB_LIMIT = 1 << 26  # bytes: the environment of a job is in its file
LINE_LIMIT = 99_999  # bytes that the shepherd reads at once (fgets of 100,000 in 8.1.9)
UTF8_MOST = 4  # bytes of one character
REPEATED = ("pe_task_id",)  # execd itself writes it twice for a slave task
RECORD = "gpulock"  # the owner record in the directory, of a job that was granted GPUs
CONFIG_KEYS = {
    *("add_grp_id", "admin_user", "enable_systemd", "enable_windomacc", "epilog", "host"),
    *("host_slots", "ja_task_id", "job_id", "job_owner", "pe", "pe_hostfile", "pe_slots"),
    *("pe_start", "pe_stop", "pe_task_id", "prolog", "queue", "resume_method", "starter_method"),
    *("suspend_method", "terminate_method", "use_systemd"),
}


class Spool:
    """One shepherd, found and checked: its pid, start time and spool directory.

    `fd` stays open for the life of the hook. Where there is no array, `task` is "1" and
    `array_task` is empty. Raises Refusal where `config` cannot be read, lacks the job or is forged.
    """

    def __init__(self, pid: int, start: int, fd: int, path: str, uid: int) -> None:
        self.pid = pid
        self.start = start
        self.fd = fd
        self.path = one_line(path)
        self.uid = uid  # of the directory: the admin user's
        try:
            self.config = parse_shepherd_config(atomic.read_text("config", CONFIG_LIMIT, fd))
        except OSError as fault:
            raise unread_spool_refusal("the shepherd's config", fault) from fault
        for key, values in self.config.items():
            if len(values) > 1 and key not in REPEATED:
                raise forged_config_refusal(key)
        self.job = str(self.number("job_id"))
        number = self.number("ja_task_id")
        self.task = str(number or 1)
        self.array_task = str(number or "")

    def need(self, key: str) -> str:
        """Return one value of `config`; raise Refusal where it has none."""
        values = self.config.get(key)
        if not values:
            raise unknown_config_refusal(f"the shepherd's config has no {key}")
        return values[0]

    def number(self, key: str) -> int:
        """Return one number of `config`; raise Refusal where it is none."""
        text = self.need(key)
        if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
            raise unknown_config_refusal(f"{key} is {shorten(text)!r}")
        return int(text)


def unknown_config_refusal(what: str) -> Refusal:
    """Return the refusal of a config that is not laid out as a known Grid Engine does."""
    from gpulock.sge.spooled_job import LayoutError

    refusal = Refusal(UNKNOWN, what, "see gpulock doctor")
    refusal.__cause__ = LayoutError(what)
    return refusal


def forged_config_refusal(key: str) -> Refusal:
    """Return the refusal of a job whose own text looks like Grid Engine's."""
    return Refusal(
        INVALID_REQUEST,
        f"{key} stands in the shepherd's config more than once",
        "submit without newlines in names, paths and arguments",
    )


def unread_spool_refusal(what: str, fault: Exception) -> Refusal:
    """Return the refusal for a file of execd's that could not be read.

    What is too long is so by the user's own words, on every node: the node is not at fault.
    """
    if isinstance(fault, OSError) and fault.errno == errno.EFBIG:
        return Refusal(INVALID_REQUEST, f"{what} is too long", "submit it with less")
    return Refusal(UNKNOWN, f"{what}: {fault}", "see gpulock doctor")


def parse_shepherd_config(text: str) -> dict[str, list[str]]:
    """Return every value of the keys that matter here, on one line, read as the shepherd does.

    Of a line longer than its buffer it makes several, and strtok(" =") skips what leads a key.
    """
    values: dict[str, list[str]] = {}
    lines = text.split("\n")
    if len(text) * UTF8_MOST >= LINE_LIMIT:
        lines = [piece for line in lines for piece in split_long_line(line)]
    for line in lines:
        key, _, value = line.lstrip(" =").partition("=")
        if " " in key:
            key, _, value = line.lstrip(" =").partition(" ")
        if key in CONFIG_KEYS:
            values.setdefault(key, []).append(value if value.isprintable() else one_line(value))
    return values


def split_long_line(line: str) -> list[str]:
    """Return the lines that the shepherd makes of one, by the size of its buffer."""
    data = line.encode("utf-8", "surrogateescape")
    pieces = [data[at : at + LINE_LIMIT] for at in range(0, len(data), LINE_LIMIT)]
    return [piece.decode("utf-8", "surrogateescape") for piece in pieces]


def open_shepherd_spool(proc: Proc, pid: int, root_uid: int = 0) -> Spool:
    """Return the spool of the shepherd `pid`; raise Refusal when it is not one.

    `root_uid` is 0, or in a simulation the uid that owns it.
    """
    try:
        start = proc.stat(pid).start
        status = proc.status(pid)
        if status.name != SHEPHERD_NAME or status.uids[0] != root_uid:
            raise Refusal(
                BROKEN,
                f"the parent {pid} is {status.name!r} of uid {status.uids[0]}, no shepherd",
                "only Grid Engine starts this hook",
            )
        fd = os.open(f"{proc.root}/{pid}/cwd", os.O_RDONLY | os.O_DIRECTORY)
        info = os.fstat(fd)
        check_spool_owner(proc, pid, status.uids, info, root_uid)
        path = proc.link(pid, "cwd")
        if proc.stat(pid).start != start:
            raise ProcessLookupError(pid)
        return Spool(pid, start, fd, path, info.st_uid)
    except (OSError, ValueError) as fault:
        raise Refusal(
            UNKNOWN, f"the shepherd {pid} cannot be seen: {fault}", "see gpulock doctor"
        ) from fault


def check_spool_owner(
    proc: Proc, pid: int, uids: "tuple[int, ...]", info: os.stat_result, root_uid: int
) -> None:
    """Raise Refusal unless the directory is of one of the shepherd's uids, which alone may write.

    A shepherd is root alone for a moment at each line of its trace (facts/grid-engine.md, user,
    directory and output of hooks), three times after it started a hook: it is asked again.
    """
    writable = bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    deadline = Deadline(OWNER_SECONDS)
    while info.st_uid not in uids and not writable and deadline.left() > 0:
        time.sleep(OWNER_PAUSE)
        uids = proc.status(pid).uids
    if writable or info.st_uid not in uids:
        raise Refusal(
            UNKNOWN if not writable and set(uids) == {root_uid} else BROKEN,
            f"the shepherd's directory has uid {info.st_uid}, mode {info.st_mode & 0o7777:o}, and "
            f"the shepherd {' '.join(map(str, uids))}",
            "see gpulock doctor",
        )


def count_sge_job_hosts(spool: Spool) -> int:
    """Return on how many hosts a parallel job has slots; raise Refusal if that cannot be read."""
    try:
        lines = atomic.read_text("pe_hostfile", JOB_LIMIT, spool.fd).split("\n")
    except OSError as fault:
        raise unread_spool_refusal("the job's host file", fault) from fault
    return len({line.split()[0] for line in lines if line.strip()})
