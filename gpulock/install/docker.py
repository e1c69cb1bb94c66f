# SPDX-License-Identifier: Apache-2.0
"""Docker takes the names of the node's devices, by which `$GPULOCK_CDI` means a job's GPUs.

Docker starts containers as root, outside of the job that calls it, and tells no OCI hook which job
that was. So its mask comes with the names of CDI (docs/facts/containers.md).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

from gpulock.install.hooks import InstallError, run_program

DAEMON_JSON: Final = Path("/etc/docker/daemon.json")
PID_FILE: Final = "run/docker.pid"  # written when the daemon starts
DOCKERD: Final = ("usr/bin/dockerd", "usr/local/bin/dockerd", "usr/sbin/dockerd")
CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")  # in which Docker and podman look by themselves
FOLDERS: Final = "cdi-spec-dirs"
CDI_KNOWN: Final = (25, 0)  # the first release with the feature
CDI_BY_ITSELF: Final = (28, 2)  # the first one where it is on unless it is turned off
_SECONDS: Final = 10.0

Release = tuple[int, int]


def find_dockerd(root: Path = Path("/")) -> Path | None:
    """Return Docker's daemon program, None where there is none."""
    return next((path for path in (root / name for name in DOCKERD) if path.is_file()), None)


def dockerd_release(program: Path) -> Release | None:
    """Return the release of Docker's daemon, None where it does not say."""
    try:
        text = run_program([program, "--version"], _SECONDS, {"PATH": "/usr/sbin:/usr/bin"}).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_daemon_json(text: str | None) -> dict[str, Any]:
    """Return the settings of Docker's daemon; raise InstallError where they are none."""
    text = (text or "").removeprefix("\ufeff")
    if not text.strip():
        return {}
    try:
        found: Any = json.loads(text)
    except ValueError as wrong:
        raise InstallError(f"{DAEMON_JSON}: {wrong}; correct it") from wrong
    if isinstance(found, dict):
        settings = cast("dict[str, Any]", found)
        if settings.get("features") is None or isinstance(settings["features"], dict):
            return settings
    raise InstallError(f"{DAEMON_JSON} is not as Docker reads it; correct it")


def spec_folders(settings: dict[str, Any]) -> list[str]:
    """Return the folders in which Docker looks for specs; raise InstallError. Pure."""
    given: Any = settings.get(FOLDERS)
    if given is None:
        return [*CDI_FOLDERS]
    if not isinstance(given, list):
        raise InstallError(f"{DAEMON_JSON}: {FOLDERS} is no list; correct it")
    return [str(one) for one in cast("list[object]", given) if one]


def is_among(folder: str, folders: Iterable[str]) -> bool:
    """Return whether a folder is one of these; /var/run is /run."""
    return plain_folder(folder) in [plain_folder(one) for one in folders]


def plain_folder(folder: str) -> str:
    """Return the one name of a folder that may have two."""
    return re.sub(r"^/var/run/", "/run/", f"{folder.rstrip('/')}/")


def takes_cdi_names(text: str | None, release: Release | None, folder: str) -> bool:
    """Return whether Docker takes the names of the specs in a folder; raise InstallError. Pure.

    `text` is daemon.json, None where there is none. Of a release that is not known the file counts.
    """
    settings = parse_daemon_json(text)
    features: dict[str, Any] = settings.get("features") or {}
    asked = features.get("cdi")
    if release is not None and release < CDI_KNOWN:
        return False
    by_itself = asked is None and release is not None and release >= CDI_BY_ITSELF
    return (asked is True or by_itself) and is_among(folder, spec_folders(settings))
