# SPDX-License-Identifier: Apache-2.0
"""Which users' jobs on a terminal would put a queue with a prolog in error."""

from __future__ import annotations

import re
from pathlib import Path

from gpulock.install.sge.programs import OCS
from gpulock.install.sge.qconf import is_sge_none
from gpulock.install.sge.site import SgeSite
from gpulock.install.sge.texts import SHEPHERD


def sge_admin_user(site: SgeSite) -> str:
    """Return the user that the daemons run as; `unknown` where bootstrap cannot be read."""
    try:
        text = Path(site.root, site.cell, "common/bootstrap").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"(?m)^admin_user\s+(\S+)", text)
    return found[1].lower() if found else "unknown"


def terminal_advice(release: str, user: str, shepherd_cmd: str) -> tuple[str, ...]:
    """Return which interactive jobs stop a queue with a prolog, and what to do; pure.

    `user` is the daemons' user. The two Grid Engines break opposite ones (facts/grid-engine.md),
    and our shepherd_cmd cures both.
    """
    if shepherd_cmd.endswith(f"/{SHEPHERD}"):
        return ()
    ours = "have gpulock's shepherd_cmd start the site's"
    if is_sge_none(shepherd_cmd):
        ours = "have gpulock's shepherd_cmd"
    if release.startswith(OCS):
        return "a qrsh -pty no of any user puts its queue in error", f"{ours} (SGE_SHEPHERD)"
    if user in ("none", "root"):
        return ()
    what = f"admin_user is {user}: a qrsh of any user on a terminal puts its queue in error"
    return what, f"{ours} (SGE_SHEPHERD), or set admin_user none in bootstrap and restart"
