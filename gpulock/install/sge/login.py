# SPDX-License-Identifier: Apache-2.0
"""The login scripts by which a qlogin comes to the mask of its job.

sh, bash, dash and ksh read /etc/profile.d/*.sh. csh and tcsh read gpulock.csh, from there or from
Debian's own folder. Who reads neither: docs/grid-engine.md, interactive jobs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, find_share_folder
from gpulock.install.items import FileItem, Item

PROFILE: Final = Path("/etc/profile.d/gpulock.sh")
CSH_FOLDER: Final = "csh/login.d"  # of Debian, below /etc


def login_script_text(spool: str, gid_range: str) -> str:
    """Return the script of sh for execd's spool directory and its groups; raise InstallError."""
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


def login_script_items(profile: Path, text: str = "") -> list[Item]:
    """Return the login scripts of sh, and of csh which runs it; that is in Debian's folder, too."""
    csh, folder = profile.with_suffix(".csh"), profile.parents[1] / CSH_FOLDER
    by_csh = (find_share_folder() / "prolog/profile.csh").read_text()
    by_csh = by_csh.replace("@PROFILE@", str(profile))
    paths = [csh, *([folder / csh.name] if folder.is_dir() else [])]
    return [FileItem(profile, text), *(FileItem(path, by_csh) for path in paths)]
