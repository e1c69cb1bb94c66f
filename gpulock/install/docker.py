# SPDX-License-Identifier: Apache-2.0
"""Docker takes the names of the node's devices, by which `$GPULOCK_CDI` means a job's GPUs.

Docker starts containers as root, outside of the job that calls it, and tells no OCI hook which job
that was. So its mask comes with the names of CDI (docs/facts/containers.md).
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final, cast

from gpulock.install.hooks import InstallError, run_program

DAEMON_JSON: Final = Path("/etc/docker/daemon.json")
DOCKERD: Final = ("usr/bin/dockerd", "usr/local/bin/dockerd", "usr/sbin/dockerd")
CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")  # in which Docker looks by itself
CDI_BY_ITSELF: Final = (28, 2)  # the release that takes names unless it is told not to
_SECONDS: Final = 10.0


def find_dockerd(root: Path = Path("/")) -> Path | None:
    """Return Docker's daemon program, None where there is none."""
    return next((path for path in (root / name for name in DOCKERD) if path.is_file()), None)


def dockerd_release(program: Path) -> tuple[int, int] | None:
    """Return the release of Docker's daemon, None where it does not say."""
    try:
        text = run_program([program, "--version"], _SECONDS, {"PATH": "/usr/sbin:/usr/bin"}).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_daemon_json(text: str | None) -> dict[str, Any]:
    """Return the settings of Docker's daemon; raise InstallError where they are none."""
    if not (text or "").strip():
        return {}
    try:
        found: Any = json.loads(text or "")
    except ValueError as fault:
        raise InstallError(f"{DAEMON_JSON}: {fault}; correct it") from fault
    if isinstance(found, dict):
        settings = cast("dict[str, Any]", found)
        if isinstance(settings.get("features", {}), dict):
            return settings
    raise InstallError(f"{DAEMON_JSON} is not as Docker reads it; correct it")


def takes_cdi_names(text: str | None, release: tuple[int, int] | None) -> bool:
    """Return whether Docker takes names of CDI; raise InstallError. Pure."""
    asked = parse_daemon_json(text).get("features", {}).get("cdi")
    if asked is None:
        return release is not None and release >= CDI_BY_ITSELF
    return asked is True


def enable_cdi(text: str | None, folder: str) -> str:
    """Return daemon.json with which Docker takes names, of the specs in `folder` too; pure.

    Everything else stays. Raises InstallError.
    """
    found = parse_daemon_json(text)
    given: Any = found.get("cdi-spec-dirs", [*CDI_FOLDERS])
    if not isinstance(given, list):
        raise InstallError(f"{DAEMON_JSON}: cdi-spec-dirs is no list; correct it")
    folders = cast("list[object]", given)
    known = {str(one).rstrip("/") for one in folders}
    enabled = found.get("features", {}).get("cdi") is True
    if enabled and folder.rstrip("/") in known:
        return text or ""
    found["features"] = {**found.get("features", {}), "cdi": True}
    if folder.rstrip("/") not in known:
        found["cdi-spec-dirs"] = [*folders, folder]
    return json.dumps(found, indent=4) + "\n"
