# SPDX-License-Identifier: Apache-2.0
"""For which scheduler gpulock is installed here, and where its hooks are.

Of Slurm the map of its positions tells: it is the first thing that is put in place, and the last
that goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.change import install_record
from gpulock.install.hooks import InstallError
from gpulock.install.versions import DEFAULT_PREFIX, InstalledHooks, version_in_force
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import NAME, read_map_pairs

HOOKS, PYTHON = "hooks", "python"  # keys of the map that no hook reads


@dataclass(frozen=True)
class SlurmInstallation:
    """Where Slurm's hooks are on this node, and for which Python they were rendered."""

    prefix: Path = DEFAULT_PREFIX
    python: str = ""

    def pairs(self) -> list[tuple[str, str]]:
        """Return the same as pairs of the map."""
        return [(HOOKS, str(self.prefix)), *([(PYTHON, self.python)] if self.python else [])]


def parse_slurm_installation(pairs: Mapping[str, str]) -> SlurmInstallation:
    """Return the installation that a map tells of; pure."""
    return SlurmInstallation(Path(pairs.get(HOOKS, DEFAULT_PREFIX)), pairs.get(PYTHON, ""))


def find_slurm_installation(settings: Settings) -> SlurmInstallation | None:
    """Return the installation for Slurm, None where there is none."""
    if not Path(settings.state_dir, NAME).exists():
        return None
    try:
        return parse_slurm_installation(read_map_pairs(settings.state_dir))
    except Refusal:  # doctor says what is wrong with the map
        return SlurmInstallation()


def is_slurm_installed(settings: Settings, prefix: Path) -> bool:
    """Return whether hooks or map are here for Slurm, also where the map was lost."""
    if find_slurm_installation(settings) is not None:
        return True
    return version_in_force(prefix) is not None and not install_record(settings, "sge").load()


def find_installed_prefix(settings: Settings) -> Path:
    """Return the folder of the hooks in force."""
    try:
        addresses = install_record(settings, "sge").load()
    except InstallError:
        addresses = {}
    noted = [Path(one[1]) for one in addresses if one[0] == InstalledHooks.kind]
    slurm = find_slurm_installation(settings)
    return noted[-1] if noted else slurm.prefix if slurm else DEFAULT_PREFIX
