# SPDX-License-Identifier: Apache-2.0
"""Texts of an installation: settings file, login script, complex, bootstrap; as good as pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpulock.install.hooks import InstallError, find_share_folder
from gpulock.install.sge.site import SgeSite

_CHANGEABLE: Final = "# written by gpulock install sge; a key that stands here already is kept\n"


def sge_settings_text(text: str | None, wanted: dict[str, str]) -> str:
    """Return the settings file with the keys added that it lacks; pure."""
    present = frozenset(re.findall(r"(?m)^\s*([A-Z_]+)\s*=", text or ""))
    added = "".join(f"{name}={value}\n" for name, value in wanted.items() if name not in present)
    if not added:
        return text or ""
    start = text or ""
    return f"{start}{'' if start.endswith(chr(10)) or not start else chr(10)}{_CHANGEABLE}{added}"


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
    if kind != "INT":
        return f"its type is {kind}, it must be INT"
    if relop != "<=":
        return f"its relation is {relop}, it must be <="
    if consumable not in ("YES", "JOB"):
        return f"consumable is {consumable}, it must be YES (per slot) or JOB (per job)"
    if default != "0":
        return f"its default is {default}, which no hook can see; it must be 0"
    if requestable not in ("YES", "FORCED"):
        return "nobody can request it"
    return ""


def sge_admin_user(site: SgeSite) -> str:
    """Return the user that the daemons run as; `unknown` where bootstrap cannot be read."""
    try:
        text = Path(site.root, site.cell, "common/bootstrap").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"(?m)^admin_user\s+(\S+)", text)
    return found[1].lower() if found else "unknown"
