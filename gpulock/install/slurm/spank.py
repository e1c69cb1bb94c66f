# SPDX-License-Identifier: Apache-2.0
"""gpulock's SPANK plugin: how it is compiled, and what plugstack.conf names.

Slurm loads a plugin of its own major and minor release alone, and tells of any other, so there is
no binary to ship: the Makefile of prolog/spank compiles it. It runs the TaskProlog hook on the
node, where pyxis would run it inside a container. plugstack.conf is the cluster's, and only read;
slurmstepd calls the plugins in the order of its lines.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, find_share_folder, remove_file
from gpulock.install.items import Item, Remainder, Wanted
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_file
from gpulock.install.versions import FOLDER as HOOKS
from gpulock.store import atomic

PLUGIN: Final = "spank_gpulock.so"
AGAIN: Final = "again"  # the word of its second line
_PYXIS: Final = "spank_pyxis"
_DEPTH: Final = 8  # of include
FOLDER: Final = "prolog/spank"
_LARGEST: Final = 1 << 22  # bytes of a plugin


class SpankPlugin(Item):
    """The compiled plugin: an administrator makes it, and so chooses it; it goes with the hooks."""

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
        if wanted is Wanted.ABSENT:
            return None
        try:
            same = self.build() in atomic.read_file(str(self.path), _LARGEST)
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; look at it") from fault
        return None if same else Remainder(f"{self.path} is of another gpulock", self.page())

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


@dataclass(frozen=True)
class SpankEntry:
    """One plugin of plugstack.conf; `file` is where its line stands."""

    path: Path
    words: tuple[str, ...]
    required: bool
    file: Path


@dataclass(frozen=True)
class PlugStack:
    """The plugins of plugstack.conf, in their order."""

    path: Path
    entries: tuple[SpankEntry, ...]

    @property
    def ours(self) -> tuple[SpankEntry, ...]:
        """The lines that name gpulock's plugin, wherever it is."""
        return tuple(entry for entry in self.entries if entry.path.name == PLUGIN)

    @property
    def pyxis(self) -> SpankEntry | None:
        """The line of pyxis."""
        return next((entry for entry in self.entries if _PYXIS in entry.path.name), None)

    def is_right(self, plugin: Path) -> bool:
        """Say whether our line is above pyxis, and once more, with `again`, below it."""
        if not all(entry.required and entry.path == plugin for entry in self.ours):
            return False
        letters = {True: "b", False: "a"}
        order = "".join(
            letters[AGAIN in entry.words] if entry in self.ours else "p"
            for entry in self.entries
            if entry in self.ours or entry == self.pyxis
        )
        return re.fullmatch("a[ab]*p.*b.*" if self.pyxis else "a[ab]*", order) is not None


def find_plugstack(conf: SlurmConf, slurm_conf: Path | None) -> PlugStack:
    """Return the plugins of this node's Slurm; raise InstallError for a file that is unreadable."""
    named = conf.get("PlugStackConfig")
    folder = slurm_conf.parent if slurm_conf else Path("/etc/slurm")
    path = folder / (named or "plugstack.conf")
    return PlugStack(path, tuple(read_plugstack(path)))


def read_plugstack(path: Path, depth: int = 0) -> list[SpankEntry]:
    """Return the lines of a file and of those it includes; raise InstallError."""
    if not path.exists():
        return []
    if depth > _DEPTH:
        raise InstallError(f"{path}: include within include without end; look at it")
    entries: list[SpankEntry] = []
    for line in read_slurm_file(path).decode("utf-8", "surrogateescape").splitlines():
        words = line.partition("#")[0].split()
        if len(words) <= 1:
            continue
        if words[0] == "include":
            for name in sorted(glob.glob(str(path.parent / words[1]))):
                entries += read_plugstack(Path(name), depth + 1)
        else:
            required = words[0] == "required"
            entries.append(SpankEntry(Path(words[1]), tuple(words[2:]), required, path))
    return entries


def plugstack_left(stack: PlugStack, plugin: Path) -> Remainder | None:
    """Return what plugstack.conf lacks, without which no task has its mask; pure."""
    if stack.is_right(plugin):
        return None
    page = [
        f"Into {stack.path}, on every node and login node, as its first line and its last:",
        "",
        f"    required {plugin}",
        f"    required {plugin} {AGAIN}",
        "",
        "The file must be there on all of them: without it no srun and sbatch works.",
    ]
    return Remainder(f"{stack.path} has gpulock's plugin not as it must be around pyxis", page)
