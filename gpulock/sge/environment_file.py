# SPDX-License-Identifier: Apache-2.0
"""The job's `environment` file in its shepherd's directory, which the shepherd gives to the job.

Hot, for prologs. A line is replaced, never appended: with INHERIT_ENV=false both lines reach
execve, and C libraries take the first, which is the user's (facts/grid-engine.md). The file is
written beside and renamed in, with its owner and mode.
"""

import errno
import os

from gpulock.errors import INVALID_REQUEST, Refusal, os_error_kind
from gpulock.job.environment import BIND_LISTS, append_binds, user_bind_lists
from gpulock.sge.spool import Spool
from gpulock.store import atomic

ENVIRONMENT = "environment"
ENVIRONMENT_LIMIT = 1 << 26  # bytes: a job may carry a large environment
LONGEST_VARIABLE = 9998  # bytes: the shepherd makes several of a longer line (fgets of 10,000)


def rewrite_env_text(
    text: str, pairs: list[tuple[str, str]], drop: frozenset[str], binds: str, mps_dir: str = ""
) -> str:
    """Return the file's text with our variables in it once, and none of `drop` besides.

    Nor has it what is of an MPS below `mps_dir`, unless that is ours. `binds` is appended to the
    container bind lists, which are the user's as well. A line too long for the shepherd is cut: its
    rest would be a line of its own, such as another mask. So would be what follows a newline in a
    variable's name, which execd does not escape.
    """
    drop |= {name for name, _ in pairs}
    if mps_dir and f"={mps_dir}/" in text:
        from gpulock.job.mps import stale_mps_names

        split = [line.partition("=") for line in text.split("\n")]
        drop |= stale_mps_names([(name, value) for name, _, value in split], mps_dir)
    kept: list[str] = []
    bound: dict[str, str] = dict.fromkeys(BIND_LISTS, "") if binds else {}
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if not name or name in drop:  # the shepherd's strtok takes `=ENVIRONMENT=x` for ENVIRONMENT
            continue
        if equals and name in bound:
            bound[name] = value
            continue
        kept.append(truncate_env_line(line))
    kept += [f"{name}={escape_env_value(value)}" for name, value in pairs]
    if binds:
        kept += [
            sge_bind_line(name, old, escape_env_value(binds))
            for name, old in user_bind_lists(bound)
        ]
    return "\n".join(kept) + "\n"


def sge_bind_line(name: str, old: str, binds: str) -> str:
    """Return the line of a bind list; a list of the user's that leaves ours no room is dropped."""
    line = f"{name}={append_binds(old, binds)}"
    return line if truncate_env_line(line) == line else f"{name}={binds}"


def truncate_env_line(line: str) -> str:
    """Return the part of a line that the shepherd reads at once."""
    data = line.encode("utf-8", "surrogateescape")
    return data[:LONGEST_VARIABLE].decode("utf-8", "surrogateescape")


def escape_env_value(value: str) -> str:
    """Return a value as the shepherd reads it back (builtin_starter.c); newlines are refused."""
    if "\n" in value:
        raise ValueError("a newline in a variable")
    return value.replace("\\", "\\\\")


def write_sge_env_file(
    spool: Spool, pairs: list[tuple[str, str]], drop: frozenset[str], binds: str, mps_dir: str
) -> None:
    """Give the job its variables; raise Refusal when that cannot be done."""
    try:
        info = os.stat(ENVIRONMENT, dir_fd=spool.fd, follow_symlinks=False)
        if info.st_uid not in (spool.uid, os.geteuid()):
            raise OSError(f"it belongs to uid {info.st_uid}")
        text = atomic.read_text(ENVIRONMENT, ENVIRONMENT_LIMIT, spool.fd)
        text = rewrite_env_text(text, pairs, drop, binds, mps_dir)
        data = text.encode("utf-8", "surrogateescape")
        owner = (info.st_uid, info.st_gid) if os.geteuid() == 0 else None
        atomic.replace_file(ENVIRONMENT, data, info.st_mode & 0o777, spool.fd, owner)
    except (OSError, ValueError) as fault:
        if isinstance(fault, OSError) and fault.errno == errno.EFBIG:
            raise Refusal(INVALID_REQUEST, "its environment is too large", "export less") from fault
        raise Refusal(
            os_error_kind(fault),
            f"the job's environment file: {fault}",
            "look at execd's spool directory",
        ) from fault
