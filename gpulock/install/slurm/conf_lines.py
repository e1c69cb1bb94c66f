# SPDX-License-Identifier: Apache-2.0
"""What slurm.conf lacks of the lines by which Slurm starts the hooks, and what of it leads to them.

The file is the cluster's and is only read: an administrator is told what to put there, and what to
take out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulock.install.items import Remainder
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import read_slurm_conf
from gpulock.install.slurm.spank import PlugStack
from gpulock.install.slurm.wanted import (
    PATHS,
    TASK,
    WantedLine,
    find_slurm_hooks,
    slurm_conf_page,
    wanted_setting_lines,
)
from gpulock.install.versions import PLUGIN, current_hooks
from gpulock.node.settings import Settings

_PRINTED: Final = (
    "gpulock install slurm --dry-run prints the lines: put them into slurm.conf, or its template"
    " (Ansible, Puppet), then scontrol reconfigure once"
)


def missing_lines(site: SlurmSite, settings: Settings, by_spank: bool) -> Remainder | None:
    """Return what slurmctld must go by, and does not; raise InstallError.

    TaskProlog is not wanted where the SPANK plugin runs the same hook.
    """
    conf, paths = site.in_force(), current_hooks(settings)
    lacks = [
        WantedLine(hook.key, str(hook.own), " ".join(hook.values))
        for hook in find_slurm_hooks(conf, paths, site.conf)
        if not hook.ours and not (by_spank and hook.key == TASK)
    ]
    lacks += [one for one in wanted_setting_lines(conf, settings) if one.needed]
    keys = [one.key if one.key in PATHS else f"{one.key}={one.value}" for one in lacks]
    what = f"slurm.conf lacks {', '.join(keys)}"
    return Remainder(what, slurm_conf_page(lacks), _PRINTED) if lacks else None


def lines_that_lead_here(site: SlurmSite, settings: Settings) -> Iterator[str]:
    """Yield what starts a program of ours, in force or in the file; raise InstallError.

    What the file says counts from the next reconfigure on.
    """
    conf, paths = site.in_force(), current_hooks(settings)
    for file, line in PlugStack(conf, site.conf).naming(str(paths.folder.with_name(PLUGIN))):
        yield f"from {file}: {line}"
    confs, shown = {"slurmctld": conf}, set[str]()
    if site.conf and site.conf.is_file():
        confs[str(site.conf)] = read_slurm_conf(site.conf)
    for source, one in confs.items():
        hooks = [hook for hook in find_slurm_hooks(one, paths, site.conf) if hook.ours]
        for hook in [hook for hook in hooks if hook.key not in shown]:
            shown.add(hook.key)
            by = "".join(f" (by {link})" for link in hook.ours if link != hook.own)
            yield f"from the slurm.conf of {source}: {hook.key}={' '.join(hook.values)}{by}"
