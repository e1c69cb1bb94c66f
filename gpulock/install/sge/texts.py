# SPDX-License-Identifier: Apache-2.0
"""Texts of an installation: command lines of prolog and epilog, login script, complex.

The site's command stands in our line as it stood in its own, so Grid Engine goes on splitting it
and filling in its $variables; our hook runs it with its own user and environment.
`prolog/drop-env` stands first: whatever the job's environment holds, it starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError, find_share_folder
from gpulock.install.trial import command_program

SHEPHERD: Final = "prolog/sge_shepherd"
HOOKS: Final = ("prolog", "epilog")
_JOB_WORDS: Final = "$job_id $ja_task_id $queue"
_SITE: Final = 6  # words before the site's: drop-env, our hook, those three, $job_owner


def hook_command(current: Path, hook: str) -> str:
    """Return the command line of a hook alone."""
    return f"root@{current}/prolog/drop-env {current}/{hook}/sge {_JOB_WORDS}"


def chained_hook_command(current: Path, hook: str, site: str) -> str:
    """Return the command line of a hook and the site's own; raise InstallError.

    What cannot be carried over exactly is refused.
    """
    for sign in ',[]"\\':
        if sign in site:
            raise InstallError(
                f"the {hook} in force cannot be kept, its command holds {sign!r}: {site}; put it"
                " into a script, or take it out and run that from your own"
            )
    if "=" in str(command_program(site)):
        raise InstallError(f"the {hook} in force cannot be kept, '=' in its path: {site}; move it")
    return f"{hook_command(current, hook)} $job_owner {site}"


def queue_hook_command(current: Path, hook: str, site: str | None) -> str:
    """Return the command line for a queue."""
    return (
        hook_command(current, hook) if site is None else chained_hook_command(current, hook, site)
    )


def is_gpulock_command(value: str | None, hook: str) -> bool:
    """Say whether a command line is gpulock's, wherever it is installed."""
    words = (value or "").split()
    starts = len(words) > 1 and words[0].endswith("/prolog/drop-env")
    return starts and words[1].endswith(f"/{hook}/sge")


def site_command_of(value: str | None, hook: str) -> str | None:
    """Return the site's own command: what is behind ours, or all of a line that is not ours."""
    if value is None or not is_gpulock_command(value, hook):
        return value
    return " ".join(value.split()[_SITE:]) or None


def login_script_text(spool: str, gid_range: str) -> str:
    """Return the login script for execd's spool directory and its groups; raise InstallError."""
    ranges = " ".join(
        part if "-" in part else f"{part}-{part}"
        for part in gid_range.replace(",", " ").split()
        if re.fullmatch(r"\d+(-\d+)?", part)
    )
    if not ranges:
        raise InstallError(f"gid_range is {gid_range!r}; set it: qconf -mconf")
    if not re.fullmatch(r"/[\w./+-]+", spool):
        raise InstallError(f"execd's spool directory has an odd name: {spool}; move it")
    text = (find_share_folder() / "prolog/profile.sh").read_text()
    return text.replace("@EXECD_SPOOL@", spool).replace("@GID_RANGES@", ranges)


def complex_fault(line: str) -> str:
    """Return why a complex cannot stand for GPUs, or nothing; pure."""
    _, _, kind, relop, requestable, consumable, default, _ = line.split()
    if kind not in ("INT", "RSMAP"):
        return f"its type is {kind}, it must be INT or RSMAP"
    if relop != "<=":
        return f"its relation is {relop}, it must be <="
    if consumable not in ("YES", "JOB", "HOST"):
        return f"consumable is {consumable}, it must be YES (per slot), JOB or HOST"
    if default not in ("0", "NONE"):
        return f"its default is {default}, which no hook can see; it must be 0"
    if requestable not in ("YES", "FORCED"):
        return "no job can request it"
    return ""
