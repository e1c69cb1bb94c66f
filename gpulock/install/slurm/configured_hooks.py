# SPDX-License-Identifier: Apache-2.0
"""Which programs Slurm runs as Prolog, TaskProlog and Epilog, and whether ours is among them.

Prolog and Epilog may be a pattern (glob): all that it names is run, in reverse alphabetical
order, until one fails; what names nothing drains the node. TaskProlog is one program.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.slurm_conf import SlurmConf

PROLOG, TASK, EPILOG = "Prolog", "TaskProlog", "Epilog"
PATHS: Final = {PROLOG: "prolog/slurm", TASK: "prolog/slurm-task", EPILOG: "epilog/slurm"}
_SCRIPT: Final = 1 << 16  # bytes of a script that may call ours


@dataclass(frozen=True)
class InForceHook:
    """One of Slurm's hooks: its value, and the programs that run here, in their order."""

    key: str
    values: tuple[str, ...]
    programs: tuple[Path, ...]
    ours: tuple[Path, ...]

    @property
    def text(self) -> str:
        """The value as slurm.conf has it."""
        return " ".join(self.values) or "none"


def find_slurm_hooks(
    conf: SlurmConf, paths: HookPaths, slurm_conf: Path | None = None
) -> list[InForceHook]:
    """Return what is in force for each hook.

    A name without a folder is beside this node's slurm.conf, also where slurmd fetched both from
    slurmctld (23.11 and later).
    """
    found: list[InForceHook] = []
    for key, hook in PATHS.items():
        values, programs = tuple(conf.get(key).splitlines()), list[Path]()
        for name in values:
            path = slurm_conf.parent / name if slurm_conf else Path(name)
            if key != TASK and any(sign in name for sign in "*?["):
                programs += [Path(one) for one in sorted(glob.glob(str(path)), reverse=True)]
            else:
                programs.append(path)
        ours = tuple(path for path in programs if leads_to_hook(path, paths.folder / hook))
        found.append(InForceHook(key, values, tuple(programs), ours))
    return found


def leads_to_hook(path: Path, target: Path) -> bool:
    """Say whether a program is ours, is a link to ours, or is a script that calls it."""
    try:
        if path == target or path.resolve(strict=True) == target.resolve(strict=True):
            return True
        with path.open("rb") as file:
            text = file.read(_SCRIPT)
    except OSError:
        return False
    if not text.startswith(b"#!"):
        return False
    lines = text.decode("utf-8", "replace").splitlines()
    called = " ".join(line for line in lines if not line.lstrip().startswith("#"))
    return str(target) in called.replace('"', " ").replace("'", " ").split()
