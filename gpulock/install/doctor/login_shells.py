# SPDX-License-Identifier: Apache-2.0
"""Whether each login shell of this node comes to the mask of a qlogin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.doctor.check import Check, fault, ok, warning
from gpulock.install.sge.login_shells import (
    csh_profile_paths,
    csh_profile_text,
    login_shell_faults,
)
from gpulock.install.sge.texts import login_script_text

_AGAIN: Final = "run gpulock install sge again"


def check_login_shells(
    profile: Path, execd: SchedulerDaemon | None, groups: str
) -> Iterator[Check]:
    """Look at the login scripts for qlogin, and at the shells that read none."""
    if not profile.exists():
        yield warning(f"no {profile}: qlogin shells get no mask", _AGAIN)
        return
    if execd is None:
        yield warning(f"{profile}: execd's folder is not known", "start execd")
        return
    wanted = {profile: login_script_text(str(execd.folder), groups)}
    wanted |= dict.fromkeys(csh_profile_paths(profile), csh_profile_text(profile))
    others = [
        path for path, text in wanted.items() if not path.exists() or path.read_text() != text
    ]
    for path in others:
        yield fault(f"{path} does not fit execd's folder {execd.folder} and gid_range", _AGAIN)
    if not others:
        yield ok(str(profile))
    for what, do in login_shell_faults(profile):
        yield warning(what, do)
