# SPDX-License-Identifier: Apache-2.0
"""Have Debian's Slurm and what the machines are made with installed, and nothing started."""

from __future__ import annotations

from typing import Final

from tests.labs.common import debian

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
