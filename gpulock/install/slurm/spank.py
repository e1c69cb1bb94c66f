# SPDX-License-Identifier: Apache-2.0
"""gpulock's SPANK plugin: how it is compiled, and what plugstack.conf names.

Slurm loads a plugin of its own major and minor release alone, and tells of any other, so there is
no binary to ship: the Makefile of prolog/spank compiles it. It runs the TaskProlog hook on the
node, where pyxis would run it inside a container. plugstack.conf is the cluster's, and only read.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.daemons import trusted_program_owners
from gpulock.install.files import find_share_folder
from gpulock.install.items import Remainder
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_lines
from gpulock.install.versions import FOLDER as HOOKS
from gpulock.store import atomic

AGAIN: Final = "again"  # the word of its second line
PYXIS: Final = "spank_pyxis"
FOLDER: Final = "prolog/spank"
_LARGEST: Final = 1 << 22  # bytes of a plugin


def build_mark(hook: Path) -> bytes:
    """Return what a plugin has in it that is compiled from this source for a hook."""
    source = (find_share_folder() / FOLDER / "spank_gpulock.c").read_bytes()
    made = hashlib.sha256(source + os.fsencode(hook)).hexdigest()
    return f"gpulock-spank-build {made[:12]}\0".encode()


class PlugStack:
    """The lines of this node's plugstack.conf and of what it includes; raises InstallError."""

    def __init__(self, conf: SlurmConf, slurm_conf: Path | None) -> None:
        folder = slurm_conf.parent if slurm_conf else Path("/etc/slurm")
        self.path = folder / (conf.get("PlugStackConfig") or "plugstack.conf")
        lines = read_slurm_lines(self.path) if self.path.exists() else ()
        self.lines = [(file, " ".join(line.split())) for file, line in lines]

    def naming(self, plugin: str) -> list[tuple[Path, str]]:
        """Return each line with a plugin, and its file."""
        return [(file, line) for file, line in self.lines if plugin in line]

    def remainder(self, plugin: Path, hook: Path) -> Remainder | None:
        """Return what is missing of plugin and lines, without which no task has its mask.

        In which order Slurm runs its plugins is not looked at: ours ends a task that it finds too
        late (prolog/spank).
        """
        wanted, is_made = [f"required {plugin}", f"required {plugin} {AGAIN}"], False
        with suppress(OSError):
            is_made = build_mark(hook) in atomic.read_file(str(plugin), _LARGEST)
        why = why_untrusted_program(plugin, trusted_program_owners())
        if is_made and why:
            what = f"{why}, and slurmd runs {plugin.name} as root"
            return Remainder(what, do="make it writable by root alone")
        needed = {*(wanted if self.naming(PYXIS) else wanted[:1])}
        if is_made and needed <= {line for _, line in self.lines}:
            return None
        prefix = [f"PREFIX={plugin.parent}"] if plugin.parent != HOOKS else []
        make = ["make", "-C", str(find_share_folder() / FOLDER), "install", *prefix]
        page = [
            "Until plugin and lines are there, jobs have their locks and no mask of gpulock's.",
            "As root, on every node and login node:",
            f"    {shlex.join(make)}",
            "It needs make, cc, and slurm/spank.h of this Slurm (libslurm-dev, slurm-devel; else"
            " SLURM=FOLDER, below which is include/).",
            f"Then into {self.path} there, as its first line and its last, pyxis between them:",
            *(f"    {line}" for line in wanted),
            "The file must be there on all of them: without it no srun and sbatch works.",
        ]
        if not is_made:
            return Remainder(f"{plugin} is not there, or is of another gpulock", page)
        return Remainder(f"{self.path} lacks lines of gpulock's SPANK plugin around pyxis", page)
