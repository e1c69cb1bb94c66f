# SPDX-License-Identifier: Apache-2.0
"""The command lines of prolog and epilog: ours, and ours with the site's own behind it; pure.

The site's command stands in our line as it stood in its own, so Grid Engine goes on splitting it
and filling in its $variables; `prolog/chain` runs it with its own user and environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError

HOOKS: Final = ("prolog", "epilog")
_VARIABLES: Final = "JOB_ID=$job_id SGE_TASK_ID=$ja_task_id QUEUE=$queue"
_CHAIN_WORDS: Final = "$job_id $ja_task_id $queue $job_owner"
_CHAIN_COUNT: Final = 2 + len(_CHAIN_WORDS.split())  # with `root@.../chain` and the hook's name
# Signs of another prolog that hands out GPUs.
RIVALS: Final = ("CUDA_VISIBLE_DEVICES", "SGE_GPU", "lock-gpu", "gpuprolog", "gpu-prolog")


def hook_command(current: Path, hook: str) -> str:
    """Return the command line of a hook alone."""
    return (
        f"root@/usr/bin/env -i PATH=/usr/bin:/bin {_VARIABLES} "
        f"{current}/prolog/launch {current}/{hook}/sge"
    )


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
    return f"root@{current}/prolog/chain {hook} {_CHAIN_WORDS} {site}"


def queue_hook_command(current: Path, hook: str, site: str | None) -> str:
    """Return the command line for a queue."""
    return (
        hook_command(current, hook) if site is None else chained_hook_command(current, hook, site)
    )


def is_gpulock_command(value: str | None, hook: str) -> bool:
    """Say whether a command line is gpulock's, wherever it is installed."""
    words = (value or "").split()
    if len(words) >= _CHAIN_COUNT and words[0].endswith("/prolog/chain") and words[1] == hook:
        return True
    return bool(words) and words[-1].endswith(f"/{hook}/sge") and "/prolog/launch" in (value or "")


def site_command_of(value: str | None, hook: str) -> str | None:
    """Return the site's own command: what is behind ours, or all of a line that is not ours."""
    if value is None or not is_gpulock_command(value, hook):
        return value
    words = value.split()
    if words[0].endswith("/prolog/chain"):
        return " ".join(words[_CHAIN_COUNT:]) or None
    return None


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
    return f"it speaks of {found[0]}" if found else ""
