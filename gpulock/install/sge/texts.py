# SPDX-License-Identifier: Apache-2.0
"""The command lines of prolog and epilog, with the site's own command behind ours.

The site's command stands in our line as it stood in its own, so Grid Engine goes on splitting it
and filling in its $variables; our hook runs it with its own user and environment.
`prolog/drop-env` stands first: whatever the job's environment holds, it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.trial import command_program

HOOKS: Final = ("epilog", "prolog")  # as they are set: no job may claim before there is an epilog
_SITE: Final = 6  # words before the site's: drop-env, our hook, those three, $job_owner


@dataclass(frozen=True)
class HookLine:
    """The command line of one of our hooks, with the site's own command that runs as well."""

    current: Path
    hook: str
    site: str = ""

    def text(self) -> str:
        """Return the line for a queue."""
        ours = f"{self.current}/prolog/drop-env {self.current}/{self.hook}/sge"
        behind = f" $job_owner {self.site}" if self.site else ""
        return f"root@{ours} $job_id $ja_task_id $queue{behind}"


def parse_hook_line(value: str | None, hook: str) -> HookLine | None:
    """Return a line as gpulock writes it, None for one that is the site's or was edited; pure."""
    words = (value or "").split()
    if not is_gpulock_command(value, hook):
        return None
    current = Path(words[1].removesuffix(f"/{hook}/sge"))
    line = HookLine(current, hook, " ".join(words[_SITE:]))
    return line if line.text() == value else None


def make_hook_line(current: Path, hook: str, site: str) -> HookLine:
    """Return the line of a hook and the site's own; raise InstallError.

    What cannot be carried over exactly is refused.
    """
    for sign in ',[]"\\':
        if sign in site:
            raise InstallError(
                f"the {hook} in force cannot be kept, its command holds {sign!r}: {site}; put it"
                " into a script, or take it out and run that from your own"
            )
    if site and "=" in str(command_program(site)):
        raise InstallError(f"the {hook} in force cannot be kept, '=' in its path: {site}; move it")
    return HookLine(current, hook, site)


def is_gpulock_command(value: str | None, hook: str) -> bool:
    """Say whether a command line is gpulock's, wherever it is installed."""
    words = (value or "").split()
    starts = len(words) > 1 and words[0].endswith("/prolog/drop-env")
    return starts and words[1].endswith(f"/{hook}/sge")
