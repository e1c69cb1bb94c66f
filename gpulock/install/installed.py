# SPDX-License-Identifier: Apache-2.0
"""For which scheduler gpulock is installed here, and where its hooks are.

A map of each tells: of Slurm's positions, of Grid Engine's ids. It is the first thing that is put
in place, and the last that goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.install.versions import DEFAULT_PREFIX, version_in_force
from gpulock.node.settings import Settings
from gpulock.sge import card_map
from gpulock.slurm import gres_map

HOOKS, PYTHON = "hooks", "python"  # keys of a map that no hook reads


@dataclass(frozen=True)
class Installation:
    """Where a scheduler's hooks are on this node, and for which Python they were rendered."""

    prefix: Path = DEFAULT_PREFIX
    python: str = ""

    def pairs(self) -> list[tuple[str, str]]:
        """Return the same as pairs of the map."""
        return [(HOOKS, str(self.prefix)), *([(PYTHON, self.python)] if self.python else [])]


def parse_installation(pairs: Mapping[str, str]) -> Installation:
    """Return the installation that a map tells of; pure."""
    return Installation(Path(pairs.get(HOOKS, DEFAULT_PREFIX)), pairs.get(PYTHON, ""))


def find_slurm_installation(settings: Settings) -> Installation | None:
    """Return the installation for Slurm, None where there is none."""
    if not Path(settings.state_dir, gres_map.NAME).exists():
        return None
    try:
        return parse_installation(gres_map.read_map_pairs(settings.state_dir))
    except Refusal:  # doctor says what is wrong with the map
        return Installation()


def find_sge_installation(settings: Settings) -> Installation | None:
    """Return the installation for Grid Engine, None where there is none."""
    try:
        return parse_installation(card_map.read_map_pairs(settings.state_dir))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # likewise
        return Installation()


def is_sge_installed(settings: Settings, prefix: Path) -> bool:
    """Return whether hooks or map are here for Grid Engine, also where the map was lost."""
    if find_sge_installation(settings) is not None:
        return True
    return version_in_force(prefix) is not None and find_slurm_installation(settings) is None


def find_installed_prefix(settings: Settings) -> Path:
    """Return the folder of the hooks in force."""
    here = find_sge_installation(settings) or find_slurm_installation(settings)
    return here.prefix if here else DEFAULT_PREFIX
