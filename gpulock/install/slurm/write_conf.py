# SPDX-License-Identifier: Apache-2.0
"""`install slurm --write-conf`: put our lines into slurm.conf, beside a backup, and in force.

Without it slurm.conf is only read. What slurmctld goes by is compared again after `scontrol
reconfigure`, since a controller may read another file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.install.change import Change, FilePlace, InstallRecord, OthersFile
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.slurm.configured_hooks import PATHS, TASK, InForceHook, find_slurm_hooks
from gpulock.install.slurm.site import FETCHED_CONF, SlurmSite, list_other_nodes
from gpulock.install.slurm.slurm_conf import SlurmConf, find_slurm_includes, read_slurm_conf
from gpulock.install.slurm.texts import INSTALL_FIRST, slurm_setting_advice
from gpulock.node.settings import Settings

MARK: Final = "# written by gpulock install slurm --write-conf"
MOST_NAMED: Final = 5  # nodes, in a message
BACKUP: Final = ".before-gpulock"


@dataclass(frozen=True)
class SlurmConfFile(OthersFile):
    """slurm.conf, which Slurm reads when it is told to."""

    kind = "slurm.conf"
    named = "{path}"

    @property
    def address(self) -> tuple[str, ...]:
        return (self.kind, str(self.path))

    def write(self, value: str | None) -> None:
        if value is None:
            raise InstallError(f"{self.path} is not gpulock's to remove")
        super().write(value)


@dataclass(frozen=True)
class SlurmConfChange(Change):
    """New lines in slurm.conf, which Slurm then goes by."""

    site: SlurmSite | None = field(default=None, compare=False)
    paths: HookPaths | None = field(default=None, compare=False)

    def apply(self) -> None:
        """Write, reconfigure, and look what is in force; raise InstallError."""
        assert self.site is not None and self.paths is not None
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
    conf: SlurmConf, hooks: list[InForceHook], paths: HookPaths, settings: Settings, spank: bool
) -> dict[str, str]:
    """Return what slurm.conf must hold and does not; raise InstallError for a site's own hooks."""
    wanted: dict[str, str] = {}
    for hook in hooks:
        if hook.ours or (spank and hook.key == TASK):
            continue
        if hook.values:
            raise InstallError(
                f"the site's {hook.key}={hook.text} is to run beside gpulock's: edit slurm.conf by"
                " hand, as it is printed without --write-conf"
            )
        wanted[hook.key] = str(PATHS[hook.key](paths))
    return wanted | {w.key: w.value for w in slurm_setting_advice(conf, settings) if w.needed}


def plan_slurm_conf(site: SlurmSite, wanted: Mapping[str, str], paths: HookPaths) -> list[Change]:
    """Return the backup and the new slurm.conf; raise InstallError where a person has to decide."""
    if not wanted:
        return []
    if site.conf is None or site.conf == FETCHED_CONF or not site.conf.is_file():
        raise InstallError(
            f"slurm.conf of this node is {site.conf or 'not known'}, which is not the cluster's"
            " own: run it with --write-conf where slurmctld runs"
        )
    path = site.conf.resolve()
    for name in find_slurm_includes(path):
        inner = read_slurm_conf(path.parent / name)
        if found := [key for key in wanted if inner.get(key)]:
            raise InstallError(f"{name} sets {found[0]}, and slurm.conf includes it: edit by hand")
    place = SlurmConfFile(path)
    before = place.read() or ""
    after = edit_slurm_conf(before, wanted)
    backup = FilePlace(path.with_name(path.name + BACKUP), path.stat().st_mode & 0o777)
    changes: list[Change] = []
    if before != after:
        changes.append(Change(backup, backup.read(), before))
    return [*changes, SlurmConfChange(place, before, after, site=site, paths=paths)]


def restore_slurm_conf(record: InstallRecord, site: SlurmSite, echo: Callable[[str], None]) -> None:
    """Put slurm.conf back before the hooks go, and reconfigure; raise InstallError.

    One that was changed since stays, and the lines that lead to the hooks are named later.
    """
    entries = record.load()
    for address in [one for one in entries if one[0] == SlurmConfFile.kind]:
        change = Change(SlurmConfFile(Path(address[1])), *entries[address])
        if change.undo():
            continue
        site.scontrol("reconfigure")
        echo(f"put back: {change.what}")
        del entries[address]
        record.save(entries)


def check_other_nodes(site: SlurmSite, installed: bool) -> None:
    """Raise InstallError where nodes may be without gpulock: their next job would drain them."""
    others = list_other_nodes(site.scontrol("show", "node", "-o"), site.nodes, os.uname().nodename)
    if others and not installed:
        more = " ..." * (len(others) > MOST_NAMED)
        raise InstallError(
            f"other nodes have this slurm.conf ({' '.join(others[:MOST_NAMED])}{more})."
            f" {' '.join(INSTALL_FIRST)} Then add --installed-everywhere"
        )


def edit_slurm_conf(text: str, wanted: Mapping[str, str]) -> str:
    """Return slurm.conf with these keys set, each where it stands or at the end; pure.

    Raises InstallError for a line that holds more than the one key.
    """
    lines = text.split("\n")
    missing = dict(wanted)
    for number, line in enumerate(lines):
        bare = line.partition("#")[0]
        for key, value in wanted.items():
            if not re.search(rf"(?i)(^|\s){key}\s*=", bare):
                continue
            if not re.fullmatch(rf"(?i)\s*{key}\s*=\s*\S*\s*", bare) or line.endswith("\\"):
                raise InstallError(f"slurm.conf: {line.strip()!r} holds more than {key}: edit it")
            lines[number] = f"{key}={value}"
            missing.pop(key, None)
    if missing:
        end = [MARK, *(f"{key}={value}" for key, value in missing.items()), ""]
        lines = [*(lines[:-1] if lines[-1] == "" else lines), *end]
    return "\n".join(lines)
