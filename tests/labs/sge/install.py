# SPDX-License-Identifier: Apache-2.0
"""Which Grid Engine the lab runs: Debian's packages, or an installation that is there.

GPULOCK_LAB_GRIDENGINE=/opt/sge names the folder of a tarball's installation: bin/ARCH,
utilbin/ARCH, lib/ARCH and util. Debian's own are then hidden from the lab's machines, so that
nothing of them is used by mistake.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.wait import LabError

VARIABLE: Final = "GPULOCK_LAB_GRIDENGINE"
_DEBIAN: Final = Path("/usr/lib/gridengine")
ADMIN: Final = "sgeadmin"


@dataclass(frozen=True)
class Installation:
    """The folders of one Grid Engine, and which folders of another are hidden beside it."""

    architecture: str
    programs: Path
    utilities: Path
    libraries: Path
    util: Path
    binary_path: str  # of the cell's bootstrap
    hidden: tuple[str, ...] = ()
    is_ocs: bool = False  # Open Cluster Scheduler

    @property
    def shepherd(self) -> Path:
        """Return the real shepherd."""
        return self.programs / "sge_shepherd"

    def link_programs(self, folder: Path) -> None:
        """Link the programs into a folder for the PATH of jobs; Debian's are in it already."""
        if self.programs != _DEBIAN:
            folder.mkdir(parents=True)
            for path in self.programs.iterdir():
                (folder / path.name).symlink_to(path)


def find_installation() -> Installation:
    """Return the installation that the variable names, else Debian's; raise LabError."""
    if not (folder := os.environ.get(VARIABLE)):
        util = Path("/usr/share/gridengine/util")
        return Installation("lx-amd64", _DEBIAN, _DEBIAN, _DEBIAN, util, "/usr/sbin")
    root = Path(folder)
    found = [path.parent for path in sorted(root.glob("bin/*/sge_qmaster"))]
    if not root.is_absolute() or len(found) != 1:
        raise LabError(f"{VARIABLE}={folder}: no single bin/ARCH/sge_qmaster below it")
    name = found[0].name
    return Installation(
        name,
        found[0],
        root / "utilbin" / name,
        root / "lib" / name,
        root / "util",
        str(root / "bin"),
        tuple(path for path in (str(_DEBIAN), "/usr/share/gridengine") if Path(path).is_dir()),
        b"JRS_hard_resource_list" in (found[0] / "sge_qmaster").read_bytes(),
    )


INSTALLATION: Final = find_installation()
PROGRAMS: Final = INSTALLATION.programs
