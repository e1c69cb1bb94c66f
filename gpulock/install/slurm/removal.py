# SPDX-License-Identifier: Apache-2.0
"""What leads Slurm to gpulock's hooks, as lines that say what to take out."""

from __future__ import annotations

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.conf_block import BEGIN, END, SplitConf, split_slurm_conf
from gpulock.install.slurm.configured_hooks import PATHS, find_slurm_hooks
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
            if hook.ours and hook.key not in of_block:
                target = PATHS[hook.key](paths)
                by = "".join(f" (by {path})" for path in hook.ours if path != target)
                lines.append(f"from the slurm.conf of {source}: {hook.key}={hook.text}{by}")
    return [*dict.fromkeys(lines)]
