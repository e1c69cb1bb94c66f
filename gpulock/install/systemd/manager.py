# SPDX-License-Identifier: Apache-2.0
"""systemd as the installer sees it: what systemctl answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, run_program

RUNNING: Final = Path("/run/systemd/system")  # sd_booted(3)
ON: Final = "enabled, active"
MASKED: Final = "masked"
UNUSED: Final = (None, "disabled, inactive", MASKED)
_SECONDS: Final = 150.0  # more than a unit's TimeoutStartSec= and TimeoutStopSec=
ASKED: Final = ("LoadState", "UnitFileState", "ActiveState", "NeedDaemonReload", "DropInPaths")


def systemctl(*words: str) -> str:
    """Run systemctl and return what it prints; raise InstallError with its own words."""
    return run_systemd_program("systemctl", *words)


def run_systemd_program(*command: str) -> str:
    """Run one of systemd's programs; raise InstallError."""
    done = run_program(command, _SECONDS, None)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:400] or "no reason given"
        raise InstallError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout


def unit_properties(unit: str, names: Sequence[str] = ()) -> dict[str, str]:
    """Return what systemd goes by for a unit, drop-ins and all; raise InstallError."""
    only = [f"--property={','.join(names)}"] if names else []
    found: dict[str, str] = {}
    for line in systemctl("show", unit, *only).splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]} {value}" if found.get(name) else value
    return found


def unit_state(seen: dict[str, str]) -> str | None:
    """Return a unit's state in two words, None for one that is not there; pure."""
    if seen.get("LoadState") == "not-found":
        return None
    if seen.get("LoadState") == MASKED or seen.get("UnitFileState", "").startswith("masked"):
        return MASKED
    return f"{seen.get('UnitFileState') or 'disabled'}, {seen.get('ActiveState') or 'inactive'}"
