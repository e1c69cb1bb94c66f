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

from gpulock.install.files import find_share_folder, remove_file
from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.slurm.slurm_conf import SlurmConf, raw_slurm_lines
from gpulock.install.versions import FOLDER as HOOKS
from gpulock.store import atomic

PLUGIN: Final = "spank_gpulock.so"
AGAIN: Final = "again"  # the word of its second line
PYXIS: Final = "spank_pyxis"
FOLDER: Final = "prolog/spank"
_LARGEST: Final = 1 << 22  # bytes of a plugin


class SpankPlugin(Item):
    """The compiled plugin, which an administrator makes; it goes with the hooks."""

    def __init__(self, folder: Path, hook: Path) -> None:
        self.path, self.hook = folder / PLUGIN, hook
        self.title = f"SPANK plugin {self.path}"

    def build(self) -> bytes:
        """Return the mark of one that is compiled from this source for this hook."""
        source = (find_share_folder() / FOLDER / "spank_gpulock.c").read_bytes()
        made = hashlib.sha256(source + os.fsencode(self.hook)).hexdigest()
        return f"gpulock-spank-build {made[:12]}\0".encode()

    def read(self) -> str | None:
        return str(self.path) if self.path.exists() else None

    def goal(self, wanted: Wanted) -> str | None:
        return None if wanted is Wanted.ABSENT else self.read()

    def write(self, wanted: Wanted) -> None:
        remove_file(self.path)

    def remainder(self, wanted: Wanted) -> Remainder | None:
        same = wanted is Wanted.ABSENT
        with suppress(OSError):
            same = same or self.build() in atomic.read_file(str(self.path), _LARGEST)
        what = f"{self.path} is {'of another gpulock' if self.path.exists() else 'not there'}"
        return None if same else Remainder(f"{what}: compile it", self.page())

    def page(self) -> list[str]:
        """Return how it is compiled."""
        prefix = [f"PREFIX={self.path.parent}"] if self.path.parent != HOOKS else []
        words = ["make", "-C", str(find_share_folder() / FOLDER), "install", *prefix]
        return [
            "As root, on every node and login node, then run this again:",
            f"    {shlex.join(words)}",
            "It needs make, cc, and slurm/spank.h of this Slurm (libslurm-dev, slurm-devel; else"
            " SLURM=FOLDER, below which is include/).",
        ]


class PlugStack:
    """The lines of this node's plugstack.conf and of what it includes; raises InstallError."""

    def __init__(self, conf: SlurmConf, slurm_conf: Path | None) -> None:
        folder = slurm_conf.parent if slurm_conf else Path("/etc/slurm")
        self.path = folder / (conf.get("PlugStackConfig") or "plugstack.conf")
        found = raw_slurm_lines(self.path, by_pattern=True) if self.path.exists() else ()
        self.lines = [(file, " ".join(bare.split())) for file, _, bare in found if bare]

    def naming(self, plugin: str) -> list[tuple[Path, str]]:
        """Return each line with a plugin, and its file."""
        return [(file, line) for file, line in self.lines if plugin in line]

    def remainder(self, plugin: Path) -> Remainder | None:
        """Return what is missing, without which no task has its mask.

        In which order Slurm runs its plugins is not looked at: ours ends a task that it finds too
        late (prolog/spank).
        """
        wanted = [f"required {plugin}", f"required {plugin} {AGAIN}"]
        there = {line for _, line in self.lines}
        if there >= {*(wanted if self.naming(PYXIS) else wanted[:1])}:
            return None
        page = [
            f"Into {self.path}, on every node and login node, as its first line and its last, pyxis"
            " between them:",
            "",
            *(f"    {line}" for line in wanted),
            "",
            "The file must be there on all of them: without it no srun and sbatch works.",
        ]
        return Remainder(f"{self.path} lacks lines of gpulock's plugin around pyxis", page)
