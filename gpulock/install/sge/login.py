# SPDX-License-Identifier: Apache-2.0
"""The login scripts by which a qlogin comes to the mask of its job, and who does not read them.

sh, bash, dash and ksh read /etc/profile.d/*.sh. csh and tcsh read gpulock.csh, from there or from
Debian's own folder. zsh reads what its own start file names; that is the site's, and none is
written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, find_share_folder
from gpulock.install.items import FileItem, Item

PROFILE: Final = Path("/etc/profile.d/gpulock.sh")
CSH_FOLDER: Final = "csh/login.d"  # of Debian, below /etc
_ZSH_FILES: Final = ("zsh/zprofile", "zsh/zshenv", "zprofile", "zshenv")
_SERVED: Final = (
    *("sh", "bash", "rbash", "dash", "ash", "ksh", "ksh93", "mksh", "lksh"),
    *("csh", "tcsh"),
)
_NO_SHELLS: Final = ("tmux", "screen", "nologin", "false", "git-shell", "scponly")


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


def csh_profile_text(profile: Path) -> str:
    """Return the script of csh, which runs that of sh."""
    text = (find_share_folder() / "prolog/profile.csh").read_text()
    return text.replace("@PROFILE@", str(profile))


def login_script_items(profile: Path, text: str = "") -> list[Item]:
    """Return the login scripts of sh and csh; csh's is in Debian's folder, too."""
    csh, folder = profile.with_suffix(".csh"), profile.parents[1] / CSH_FOLDER
    paths = [csh, *([folder / csh.name] if folder.is_dir() else [])]
    scripts = {profile: text, **dict.fromkeys(paths, csh_profile_text(profile))}
    return [FileItem(path, script) for path, script in scripts.items()]


def login_shell_faults(profile: Path) -> Iterator[tuple[str, str]]:
    """Yield which installed login shells do not come to the mask, and what to add for each."""
    etc = profile.parents[1]
    shells = [line for line in _commands(etc / "shells") if os.access(line, os.X_OK)]
    for name in sorted({*map(os.path.basename, shells)} - {*_SERVED, *_NO_SHELLS}):
        if name != "zsh":
            what = f"{name}: gpulock has no login script for it"
            yield f"{what}, and its qlogin sees every GPU", "give such users another login shell"
            continue
        said = "\n".join(line for file in _ZSH_FILES for line in _commands(etc / file))
        if "/etc/profile" not in said and str(profile) not in said:
            what = f"{name}: its qlogin sees every GPU"
            yield what, f"add to /etc/zsh/zprofile: source {profile}"


def _commands(path: Path) -> list[str]:
    """Return the lines of a file that are no comment, none of one that is not there."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if not line.lstrip().startswith("#")]
