# SPDX-License-Identifier: Apache-2.0
"""Slurm's plugstack.conf: which SPANK plugins it names, and whether ours stands where it must.

The file is the cluster's, and only read. slurmstepd calls the plugins in the order of the lines.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.configured_hooks import TASK, InForceHook
from gpulock.install.slurm.slurm_conf import SlurmConf, read_slurm_file

PLUGIN: Final = "spank_gpulock.so"
AGAIN: Final = "again"  # the word of its second line
_PYXIS: Final = "spank_pyxis"
_DEPTH: Final = 8  # of include


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
    found: list[SpankEntry] = []
    for line in read_slurm_file(path).decode("utf-8", "surrogateescape").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2:  # noqa: PLR2004
            continue
        if words[0] == "include":
            for name in sorted(glob.glob(str(path.parent / words[1]))):
                found += read_plugstack(Path(name), depth + 1)
        else:
            found.append(SpankEntry(Path(words[1]), tuple(words[2:]), words[0] == "required", path))
    return found


def plugstack_fault(stack: PlugStack, plugin: Path) -> str:
    """Return what is wrong with the lines of our plugin, nothing where all is right; pure."""
    ours, pyxis = stack.ours, stack.pyxis
    if not ours:
        return f"{stack.path} does not name {plugin}"
    if other := next(
        (entry for entry in ours if entry.path.is_absolute() and entry.path != plugin), None
    ):
        return f"{other.file} names {other.path}, not {plugin}"
    if not all(entry.required for entry in ours):
        return f"{plugin} is not `required`: where it cannot be loaded, a refused job runs"
    first = stack.entries.index(ours[0])
    if AGAIN in ours[0].words:
        return f"the first line of {plugin} says `{AGAIN}`: no task starts"
    if pyxis is None:
        return ""
    at = stack.entries.index(pyxis)
    if first > at:
        return f"{plugin} comes below pyxis: its hook is not there inside a container"
    if not any(AGAIN in entry.words for entry in stack.entries[at:] if entry in ours):
        return f"no line `{plugin} {AGAIN}` below pyxis: what an image sets stands"
    return ""


def plugstack_page(
    stack: PlugStack, plugin: Path, task: InForceHook, paths: HookPaths
) -> list[str]:
    """Return what to put into plugstack.conf, and to take out of slurm.conf; pure."""
    page: list[str] = []
    if plugstack_fault(stack, plugin):
        others = [entry for entry in stack.entries if entry not in stack.ours]
        lines = [f"required {plugin}", *map(_entry_line, others)]
        lines += [f"required {plugin} {AGAIN}"] if stack.pyxis else []
        page += [
            f"Into {stack.path}, on every node and login node, in this order. {plugin}",
            "must be there on all of them, login nodes too: without it no srun and sbatch works:",
            "",
            *[f"    {line}" for line in lines],
        ]
    if task.ours:
        page += [""] if page else []
        page += [
            f"Then take {TASK}={task.text} out of slurm.conf, and scontrol reconfigure: the plugin",
            f"runs {paths.slurm_task}. Inside a container of pyxis no TaskProlog works.",
        ]
    return page


def _entry_line(entry: SpankEntry) -> str:
    how = "required" if entry.required else "optional"
    return " ".join([how, str(entry.path), *entry.words])
