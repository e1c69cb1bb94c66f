# SPDX-License-Identifier: Apache-2.0
"""`install slurm --write-conf`: one block of lines at the end of slurm.conf, written once.

Without it slurm.conf is only read. The file is the site's: no line of it is edited, none is written
where gpulock wrote before, and nothing is ever put back. What slurmctld goes by is compared again
after `scontrol reconfigure`, since a controller may read another file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.install.change import Change, OthersFile
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.slurm.configured_hooks import PATHS, TASK, find_slurm_hooks
from gpulock.install.slurm.site import FETCHED_CONF, SlurmSite, list_other_nodes
from gpulock.install.slurm.slurm_conf import (
    SlurmConf,
    raw_slurm_lines,
    read_slurm_conf,
    slurm_pairs,
)
from gpulock.install.slurm.texts import INSTALL_FIRST, slurm_setting_advice
from gpulock.node.settings import Settings

# The first line is a comment: a backslash at the end of the line before takes nothing else.
BEGIN: Final = "# gpulock: the lines of `gpulock install slurm --write-conf`, which writes once"
END: Final = "# gpulock: end"
MOST_NAMED: Final = 5  # nodes, in a message


@dataclass(frozen=True)
class SlurmConfChange(Change):
    """New lines in slurm.conf, which Slurm then goes by."""

    site: SlurmSite | None = field(default=None, compare=False)
    paths: HookPaths | None = field(default=None, compare=False)

    def apply(self) -> None:
        """Write, reconfigure, and compare what is in force; raise InstallError."""
        assert self.site is not None and self.paths is not None
        if self.before != self.after:
            super().apply()
        self.site.scontrol("reconfigure")
        hooks = find_slurm_hooks(self.site.in_force(), self.paths, self.site.conf)
        written = self.after or ""
        if missing := [one.key for one in hooks if not one.ours and f"\n{one.key}=" in written]:
            raise InstallError(
                f"slurmctld does not go by {self.what} ({', '.join(missing)} not in force): make"
                " the same change there, then scontrol reconfigure; run it again"
            )


def slurm_conf_after(conf: SlurmConf, wanted: Mapping[str, str]) -> SlurmConf:
    """Return what is in force with these keys set; pure."""
    return SlurmConf(conf.values | {key.lower(): v for key, v in wanted.items()}, conf.source)


def wanted_slurm_keys(
    conf: SlurmConf, paths: HookPaths, settings: Settings, spank: bool, slurm_conf: Path | None
) -> dict[str, str]:
    """Return what slurm.conf must hold and does not; raise InstallError for a site's own hooks."""
    wanted: dict[str, str] = {}
    for hook in find_slurm_hooks(conf, paths, slurm_conf):
        if hook.ours or (spank and hook.key == TASK):
            continue
        if hook.values:
            raise InstallError(
                f"the site's {hook.key}={hook.text} is to run beside gpulock's: edit slurm.conf by"
                " hand, as it is printed without --write-conf"
            )
        wanted[hook.key] = str(PATHS[hook.key](paths))
    return wanted | {w.key: w.value for w in slurm_setting_advice(conf, settings) if w.needed}


def plan_slurm_conf(
    site: SlurmSite, force: Mapping[str, str], paths: HookPaths, settings: Settings, spank: bool
) -> list[Change]:
    """Return the change of slurm.conf; raise InstallError where a person has to decide.

    `force` is what slurmctld lacks. What stands in the file already is put in force alone.
    """
    path = site.conf.resolve() if site.conf else None
    if path is None or site.conf == FETCHED_CONF or not path.is_file():
        if not force:
            return []
        raise InstallError(
            f"slurm.conf of this node is {site.conf or 'not known'}, which is not the cluster's"
            " own: run it with --write-conf where slurmctld runs"
        )
    lacks = wanted_slurm_keys(read_slurm_conf(path), paths, settings, spank, site.conf)
    lines = {key: force.get(key, v) for key, v in lacks.items() if key in force or key in PATHS}
    if not lines and not force:
        return []
    place = OthersFile(path)
    before = place.read() or ""
    check_not_written(path, before, lines)
    after = add_block(before, lines)
    return [SlurmConfChange(place, before, after, site=site, paths=paths)]


def check_not_written(path: Path, text: str, lines: Mapping[str, str]) -> None:
    """Raise InstallError where gpulock wrote before, or a key stands with another value."""
    if lines and BEGIN in text.split("\n"):
        raise InstallError(
            f"{path} has gpulock's lines already, and --write-conf writes once: add what is shown"
            " above by hand, then scontrol reconfigure",
            [f"not in {path}:", "", *(f"    {key}={value}" for key, value in lines.items()), ""],
        )
    for file, raw, bare in raw_slurm_lines(path):
        keys = {key.lower() for key, _ in slurm_pairs(bare)}
        if found := [key for key in lines if key.lower() in keys]:
            wanted = [f"    {key}={lines[key]}" for key in found]
            raise InstallError(
                f"{file} sets {' '.join(found)} already: change that by hand as shown above, and"
                " run it again",
                [f"in {file}:", "", f"    {raw.strip()}", "", "is to have:", "", *wanted, ""],
            )


def check_other_nodes(site: SlurmSite, installed: bool) -> None:
    """Raise InstallError where nodes may be without gpulock: their next job would drain them."""
    others = list_other_nodes(site.scontrol("show", "node", "-o"), site.nodes, os.uname().nodename)
    if others and not installed:
        more = " ..." * (len(others) > MOST_NAMED)
        raise InstallError(
            f"other nodes have this slurm.conf ({' '.join(others[:MOST_NAMED])}{more})."
            f" {' '.join(INSTALL_FIRST)} Then add --installed-everywhere"
        )


def add_block(text: str, lines: Mapping[str, str]) -> str:
    """Return slurm.conf with a block of lines at its end, where there are any; pure."""
    if not lines:
        return text
    gap = "\n" if text and not text.endswith("\n") else ""
    block = [BEGIN, *(f"{key}={value}" for key, value in lines.items()), END, ""]
    return f"{text}{gap}" + "\n".join(block)
