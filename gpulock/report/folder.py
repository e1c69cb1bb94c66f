# SPDX-License-Identifier: Apache-2.0
"""REPORT_DIR: a folder that the nodes share, with a file for each claim of a job.

Everybody may write there (it is like /tmp: sticky, mode 1777), so no user is believed but about
that user: a file counts only for who owns it, root's for anybody. Names end in what nobody can
guess, so nobody can take a name before its owner does; links and FIFOs are never followed or
waited for.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from gpulock.daemon.history.files import LINE_LIMIT
from gpulock.daemon.history.record import encode_history_record
from gpulock.report.claims import ReportedClaim, check_record, parse_reported_claim
from gpulock.report.scan import ClaimQuery, HistoryFaults
from gpulock.store import atomic

SUFFIX: Final = ".json"
MOST_FILES: Final = 10_000  # of one job, that are read
UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


def write_report_file(path: str, record: Mapping[str, Any]) -> str:
    """Write a record as the user of this process; return the file's name. Raises OSError."""
    words = [str(record.get(key) or "1") for key in ("job_id", "task_id", "node")]
    parts = [UNSAFE.sub("_", word)[:64] for word in words]
    name = f"{'.'.join(parts)}.{os.urandom(8).hex()}{SUFFIX}"
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        atomic.replace_file(name, encode_history_record(record), 0o644, fd)
    finally:
        os.close(fd)
    return name


def read_shared_reports(
    path: str,
    query: ClaimQuery,
    faults: HistoryFaults,
    uids: Collection[int] = (),
    others: bool = True,
    most: int = MOST_FILES,
) -> list[ReportedClaim]:
    """Return the claims of a job that its owner's processes wrote there.

    Files of `uids` and root, and those of `others` if that is asked for and there are not too
    many: nobody hides a report behind files of their own.
    """
    beginning = f"{UNSAFE.sub('_', query.job)}."
    try:
        files = sorted(list_report_files(path, beginning))
    except OSError as fault:
        faults.files.append(f"REPORT_DIR {path}: {fault.strerror}")
        return []
    own = [name for uid, name in files if uid in (0, *uids)]
    names = [name for _, name in files] if others and len(files) <= most else own
    if len(names) > most or (others and len(files) > most):
        faults.files.append(f"REPORT_DIR {path}: more than {most} files of job {query.job}")
    found: list[ReportedClaim] = []
    for name in names[:most]:
        try:
            claim = read_report_file(f"{path}/{name}")
        except (OSError, ValueError, RecursionError):
            faults.reports += 1
            continue
        if query.fits(claim):
            found.append(claim)
    return found


def list_report_files(path: str, beginning: str) -> Iterator[tuple[int, str]]:
    """Yield owner and name of each file that may be a report; raise OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and entry.name.endswith(SUFFIX):
                try:
                    yield entry.stat(follow_symlinks=False).st_uid, entry.name
                except FileNotFoundError:
                    continue


def read_report_file(path: str) -> ReportedClaim:
    """Return the claim in a file; raise OSError, ValueError where it is another user's or none.

    Raises RecursionError where it is nested too deeply.
    """
    with os.fdopen(os.open(path, atomic.OPEN_READ), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > LINE_LIMIT:
            raise ValueError("no report")
        record = check_record(json.loads(file.read(LINE_LIMIT)))
    if info.st_uid not in (0, record["uid"]):
        raise ValueError(f"a report of uid {record['uid']} that uid {info.st_uid} wrote")
    return parse_reported_claim({**record, "user": report_user_name(record["uid"])})


def report_user_name(uid: int) -> str:
    """Return a user's name, which the file may not choose; where none is known its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"
