# SPDX-License-Identifier: Apache-2.0
"""What leads Slurm to gpulock's hooks, as lines that say what to take out."""

from __future__ import annotations

from collections.abc import Iterator

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.conf_block import BEGIN, END, SplitConf, split_slurm_conf
from gpulock.install.slurm.configured_hooks import (
    PATHS,
    InForceHook,
    find_slurm_hooks,
    is_glob_pattern,
    is_hook_wrapper,
)
from gpulock.install.slurm.plugstack import PLUGIN, find_plugstack
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import read_slurm_file


def slurm_hook_references(site: SlurmSite, paths: HookPaths, block_stays: bool) -> list[str]:
    """Return what starts a program of ours, in force or in the file; raise InstallError."""
    conf = site.best()
    path = site.conf if site.conf and site.conf.is_file() else None
    plugin = paths.folder.parent / PLUGIN
    ours = [one for one in find_plugstack(conf, site.conf).ours if one.path == plugin]
    lines = [f"from {one.file}: {' '.join([str(one.path), *one.words])}" for one in ours]
    split = SplitConf("", None, "")
    if path is not None:
        text = read_slurm_file(path).decode("utf-8", "surrogateescape")
        split = split_slurm_conf(path, text)
    if split.lines and block_stays:
        lines += [f"from {path}: {line}" for line in (BEGIN, *split.lines, END)]
    of_block = {line.partition("=")[0] for line in split.lines or ()}
    in_force = find_slurm_hooks(conf, paths, site.conf)
    in_file = find_slurm_hooks(site.in_file(), paths, site.conf) if path else []
    later = [hook for hook in in_file if hook not in in_force]  # at the next reconfigure
    for hooks, source in ((in_force, conf.source), (later, str(path))):
        for hook in hooks:
            if hook.key not in of_block:
                lines += hook_references(hook, paths, source)
    return [*dict.fromkeys(lines)]


def hook_references(hook: InForceHook, paths: HookPaths, source: str) -> Iterator[str]:
    """Yield what of one hook leads to ours: a wrapper, a link in a folder, a line."""
    target = PATHS[hook.key](paths)
    for path in hook.ours:
        if is_hook_wrapper(path, target):
            yield f"from {path}, on every node: the line with {target}"
        elif any(map(is_glob_pattern, hook.values)) and str(path) not in hook.values:
            yield f"on every node: rm {path}"
        else:
            yield f"from the slurm.conf of {source}: {hook.key}={hook.text}"
