# SPDX-License-Identifier: Apache-2.0
"""Which programs Slurm runs as Prolog, TaskProlog and Epilog, and whether ours is among them.

Prolog and Epilog may be a pattern (glob): all that it names is run, in reverse alphabetical
order, until one fails; what names nothing drains the node. TaskProlog is one program.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.slurm_conf import SlurmConf

PROLOG, TASK, EPILOG = "Prolog", "TaskProlog", "Epilog"
PATHS: Final[dict[str, Callable[[HookPaths], Path]]] = {
    PROLOG: lambda paths: paths.slurm_prolog,
    TASK: lambda paths: paths.slurm_task,
    EPILOG: lambda paths: paths.slurm_epilog,
}
_SIGNS: Final = "*?["
_SCRIPT: Final = 1 << 16  # bytes of a script that may call ours


@dataclass(frozen=True)
class InForceHook:
    """One of Slurm's hooks: its value, and the programs that run here, in their order."""

    key: str
    values: tuple[str, ...]
    programs: tuple[Path, ...]
    ours: tuple[Path, ...]

    @property
    def others(self) -> tuple[Path, ...]:
        """The programs that are the site's, or that call ours among other things."""
        return tuple(path for path in self.programs if path not in self.ours)

    @property
    def text(self) -> str:
        """The value as slurm.conf has it."""
        return " ".join(self.values) or "none"


def find_slurm_hook(
    conf: SlurmConf, key: str, paths: HookPaths, slurm_conf: Path | None = None
) -> InForceHook:
    """Return what is in force for one hook.

    A name without a folder is beside this node's slurm.conf, also where slurmd fetched both from
    slurmctld (23.11 and later).
    """
    target = PATHS[key](paths)
    values = tuple(conf.patterns(key))
    programs: list[Path] = []
    folder = str(slurm_conf.parent) if slurm_conf else ""
    for name in values:
        value = f"{folder}/{name}" if name and folder and not name.startswith("/") else name
        if key != TASK and is_glob_pattern(value):
            programs += [Path(name) for name in sorted(glob.glob(value), reverse=True)]
        elif value:
            programs.append(Path(value))
    ours = tuple(path for path in programs if leads_to_hook(path, target))
    return InForceHook(key, values, tuple(programs), ours)


def find_slurm_hooks(
    conf: SlurmConf, paths: HookPaths, slurm_conf: Path | None = None
) -> list[InForceHook]:
    """Return what is in force for each hook."""
    return [find_slurm_hook(conf, key, paths, slurm_conf) for key in PATHS]


def is_glob_pattern(value: str) -> bool:
    """Say whether a value is a glob pattern."""
    return any(sign in value for sign in _SIGNS)


def leads_to_hook(path: Path, target: Path) -> bool:
    """Say whether a program is ours, is a link to ours, or is a script that calls it."""
    try:
        if path == target or path.resolve(strict=True) == target.resolve(strict=True):
            return True
        with path.open("rb") as file:
            text = file.read(_SCRIPT)
    except OSError:
        return False
    return text.startswith(b"#!") and script_calls(text.decode("utf-8", "replace"), target)


def script_calls(script: str, target: Path) -> bool:
    """Say whether a script names a program outside its comments; pure."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    return any(str(target) in line.replace('"', " ").replace("'", " ").split() for line in lines)


def misplaced_program(hook: InForceHook) -> Path | None:
    """Return a program of the site's that runs before our Prolog, or after our Epilog."""
    if not hook.ours or not hook.others:
        return None
    at = hook.programs.index(hook.ours[0])
    wrong = hook.programs[:at] if hook.key == PROLOG else hook.programs[at + 1 :]
    return next((path for path in wrong if path not in hook.ours), None)
