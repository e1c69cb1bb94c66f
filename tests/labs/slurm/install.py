# SPDX-License-Identifier: Apache-2.0
"""Have Debian's Slurm and what the machines are made with installed, and nothing started."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from tests.labs.common import debian
from tests.support.contrib import unpack_contrib_package

PLUGINS: Final = Path("usr/lib/x86_64-linux-gnu/slurm-wlm")
_ROOTS_OWN: Final = Path("/srv/slurm-nvml")  # tests/release.sh

PACKAGES: Final = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "sbatch",
    "libslurm-dev": "/usr/include/slurm/spank.h",
    "libpam-slurm-adopt": "/var/lib/dpkg/info/libpam-slurm-adopt.list",
    "gcc": "gcc",
    "munge": "munged",
    "iproute2": "ip",
    "util-linux": "nsenter",
}


def install() -> bool:
    """Install what is missing; return whether anything was."""
    return debian.install(PACKAGES)


def nvml_plugin_folder(lab: Path) -> Path:
    """Return the folder with Slurm's plugin that asks NVML: below the lab's, or the root's own."""
    if _ROOTS_OWN.exists():
        return _ROOTS_OWN / PLUGINS
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    unpack_contrib_package(release, "slurm-wlm-nvml-plugin", lab / "slurm-nvml")
    return lab / "slurm-nvml" / PLUGINS
