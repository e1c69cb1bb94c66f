# SPDX-License-Identifier: Apache-2.0
"""What leads Slurm to gpulock: the lines of slurm.conf as they stand now, and without gpulock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.conf_block import BEGIN, END
from gpulock.install.slurm.configured_hooks import (
    PATHS,
    find_slurm_hooks,
    is_glob_pattern,
    is_hook_wrapper,
    leads_to_hook,
)
from gpulock.install.slurm.slurm_conf import SlurmConf, raw_slurm_lines, slurm_pairs
from gpulock.node.settings import Settings
from gpulock.slurm.note import REQUEUE_EXIT

_HOOKS: Final = {key.lower(): key for key in PATHS}
# What a block may have beside the hooks; outside of one these are the site's own.
_OF_BLOCK: Final = ("usepam", "prologepilogtimeout", "prologtimeout", "epilogtimeout")


@dataclass(frozen=True)
class GpulockLine:
    """A line of slurm.conf as it stands, and without gpulock's part: empty where it goes.

    `leads`: Slurm starts a program of gpulock's by it. `own`: it stands between gpulock's marks.
    """

    file: Path
    text: str
    rest: str
    leads: bool = False
    own: bool = False


def list_gpulock_lines(path: Path, paths: HookPaths, settings: Settings) -> list[GpulockLine]:
    """Return the lines that are there for gpulock, of slurm.conf and of what it includes.

    Raises InstallError.
    """
    found: list[GpulockLine] = []
    own = False
    for file, raw, bare in raw_slurm_lines(path):
        if raw in (BEGIN, END):
            own = raw == BEGIN
            found.append(GpulockLine(file, raw, "", own=True))
        pairs = slurm_pairs(bare)
        left = [strip_gpulock(*pair, path.parent, paths, settings, own) for pair in pairs]
        if left != [value for _, value in pairs]:
            shown = [f"{key}={rest}" for (key, _), rest in zip(pairs, left) if rest]
            leads = any(key.lower() in _HOOKS and not rest for (key, _), rest in zip(pairs, left))
            found.append(GpulockLine(file, raw, " ".join(shown), leads, own))
    return found


def strip_gpulock(
    key: str, value: str, folder: Path, paths: HookPaths, settings: Settings, own: bool
) -> str:
    """Return a value without what is gpulock's: empty where nothing is left."""
    name = key.lower()
    if name in _HOOKS:
        program = Path(value if value.startswith("/") else folder / value)
        target = PATHS[_HOOKS[name]](paths)
        ours = leads_to_hook(program, target) and not is_hook_wrapper(program, target)
        return "" if ours else value
    if own and name in _OF_BLOCK:
        return ""
    gone = {"prologflags": "contain", "requeueexit": str(REQUEUE_EXIT)}.get(name)
    return ",".join(word for word in value.split(",") if word.strip().lower() != gone)


def list_hook_programs(
    conf: SlurmConf, paths: HookPaths, slurm_conf: Path | None, lines: Iterable[GpulockLine]
) -> list[str]:
    """Return what else starts our programs: wrappers, links, lines of another slurm.conf."""
    found: list[str] = []
    known = {key.lower() for line in lines if line.leads for key, _ in slurm_pairs(line.text)}
    for hook in find_slurm_hooks(conf, paths, slurm_conf):
        for path in hook.ours:
            target = PATHS[hook.key](paths)
            in_folder = any(is_glob_pattern(value) for value in hook.values)
            if is_hook_wrapper(path, target):
                found.append(f"from {path}, on every node: the line with {target}")
            elif in_folder and str(path) not in hook.values:
                found.append(f"on every node: rm {path}")
            elif hook.key.lower() not in known:
                found.append(f"from the slurm.conf of {conf.source}: {hook.key}={hook.text}")
    return found


def removal_page(lines: list[GpulockLine]) -> list[str]:
    """Return what to take out of slurm.conf, and what to change there; pure."""
    page: list[str] = []
    for file in dict.fromkeys(line.file for line in lines):
        here = [line for line in lines if line.file == file]
        gone = [line.text for line in here if not line.rest and (line.leads or line.own)]
        other = [line for line in here if line.text not in gone]
        if gone:
            page += [f"take out of {file}:", "", *_indented(gone), ""]
        if other:
            page += [f"change in {file}, unless something else needs it as it is:", ""]
            for line in other:
                page += _indented([line.text, f"-> {line.rest or '(take it out)'}"])
            page += [""]
    return page


def _indented(texts: list[str]) -> list[str]:
    return [f"    {line}" for text in texts for line in text.split("\n")]
