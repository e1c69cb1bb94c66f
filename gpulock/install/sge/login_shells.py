# SPDX-License-Identifier: Apache-2.0
"""The start files by which a login shell comes to the mask of its job, and which shells do not.

sh, bash, dash and ksh read /etc/profile.d/*.sh. csh and tcsh read gpulock.csh, from there or from
Debian's own folder. zsh reads what its own start file names; that is the site's, and none is
written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.install.files import find_share_folder

CSH_FOLDER: Final = "csh/login.d"  # of Debian, below /etc
_PROFILE: Final = "/etc/profile"
_CSH: Final = (("csh.login", "csh.cshrc"), ("profile.d", CSH_FOLDER), "csh.login", ".csh")
_ZSH_FILES: Final = tuple(f"{top}{name}" for top in ("zsh/", "") for name in ("zprofile", "zshenv"))
# Of a shell: its start files, what one of them names, the file for our line, our script's suffix.
_STARTS: Final = {
    "csh": _CSH,
    "tcsh": _CSH,
    "zsh": (_ZSH_FILES, (_PROFILE,), "zsh/zprofile", ".sh"),
}
_LIKE_SH: Final = frozenset(("sh", "bash", "rbash", "dash", "ash", "ksh", "ksh93", "mksh", "lksh"))
_NO_SHELLS: Final = frozenset(("tmux", "screen", "nologin", "false", "git-shell", "scponly"))


def csh_profile_paths(profile: Path) -> list[Path]:
    """Return where csh reads a login script: beside that of sh, and in Debian's folder."""
    folder = profile.parents[1] / CSH_FOLDER
    found = [folder / profile.with_suffix(".csh").name] if folder.is_dir() else []
    return [profile.with_suffix(".csh"), *found]


def csh_profile_text(profile: Path) -> str:
    """Return the login script of csh, which runs that of sh."""
    text = (find_share_folder() / "prolog/profile.csh").read_text()
    return text.replace("@PROFILE@", str(profile))


def list_login_shells(etc: Path) -> list[str]:
    """Return the names of the login shells that are installed."""
    try:
        lines = (etc / "shells").read_text().splitlines()
    except OSError:
        return []
    there = [line.strip() for line in lines if line.startswith("/")]
    return sorted({os.path.basename(line) for line in there if os.access(line, os.X_OK)})


def login_shell_faults(profile: Path) -> Iterator[tuple[str, str]]:
    """Yield which login shells do not come to the mask, and what to add for each."""
    etc = profile.parents[1]
    for name in list_login_shells(etc):
        if name in _LIKE_SH | _NO_SHELLS:
            continue
        if name not in _STARTS:
            what = f"{name}: gpulock has no login script for it"
            yield f"{what}, and its qlogin sees every GPU", "give such users another login shell"
            continue
        files, words, file, suffix = _STARTS[name]
        texts = [_read_commands(etc / one) for one in files]
        known = (*words, str(profile.with_suffix(suffix)))
        if not any(word in text for text in texts for word in known):
            line = f"source {profile.with_suffix(suffix)}"
            yield f"{name}: its qlogin sees every GPU", f"add to /etc/{file}: {line}"


def _read_commands(path: Path) -> str:
    """Return the lines of a start file that are no comment, nothing of one that is not there."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))
