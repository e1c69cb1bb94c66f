# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm`: this node's part. What leads to it in the cluster's files is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from gpulock.install.change import Address, OthersFile, Place, install_record
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.slurm.plugstack import PLUGIN, find_plugstack
from gpulock.install.slurm.removal import (
    list_gpulock_lines,
    list_hook_programs,
    removal_page,
)
from gpulock.install.slurm.site import (
    Slurmd,
    SlurmSite,
    find_slurm_site,
    find_slurmds,
    slurmds_of_site,
)
from gpulock.install.slurm.spank import SpankPlugin
from gpulock.install.uninstall import FORCE, WAIT_OR_REAP, Uninstaller
from gpulock.install.versions import CURRENT, InstalledHooks, list_locked_devices
from gpulock.node.settings import Settings
from gpulock.store.locks import LockStore


class SlurmUninstaller(Uninstaller):
    """Slurm's part of a node."""

    scheduler = "slurm"
    detached: ClassVar = frozenset(("slurm.conf", "gres-copy"))

    def obstacles(self) -> Iterator[tuple[str, str]]:
        if held := held_by_slurm(Path(self.settings.lock_dir)):
            what = f"Slurm jobs hold {len(held)} devices ({' '.join(held)})"
            yield what, f": {WAIT_OR_REAP}, or {FORCE}"
        records = [self.record, install_record(self.settings, "sge")]
        hooks = [a for one in records for a in one.load() if a[0] == InstalledHooks.kind]
        for prefix in dict.fromkeys(Path(address[1]) for address in hooks):
            try:
                site = find_slurm_site(self.settings, self.given, self.slurmds())
                leading, page = slurm_hook_references(site, self.settings, prefix)
            except InstallError as fault:
                yield f"whether Slurm still starts the hooks cannot be found out: {fault}", ""
                continue
            for line in page:
                self.echo(line)
            if leading:
                yield (
                    "Slurm still starts the hooks, and without them drains its nodes",
                    "; take out what is named above, everywhere, then scontrol reconfigure, and"
                    " run it again",
                )

    def detach(self) -> list[str]:
        """Remove what a killed --write-conf has left beside slurm.conf."""
        with suppress(InstallError):
            site = find_slurm_site(self.settings, self.given, self.slurmds())
            if site.conf and site.conf.is_file():
                OthersFile(site.conf.resolve()).discard_leftovers()
        return []

    def slurmds(self) -> list[Slurmd]:
        """Return the slurmds of this site."""
        return slurmds_of_site(find_slurmds(), self.settings)

    def place(self, address: Address) -> Place:
        if address[0] == SpankPlugin.kind:
            return SpankPlugin(Path(address[1]))
        return super().place(address)


def held_by_slurm(lock_dir: Path) -> list[str]:
    """Return the devices that Slurm jobs hold, or of which the holder cannot be told."""
    store = LockStore(str(lock_dir))
    return [
        name
        for name in list_locked_devices(lock_dir)
        if (owner := store.read(name).owner) is None or owner.scheduler == "slurm"
    ]


def slurm_hook_references(
    site: SlurmSite, settings: Settings, prefix: Path
) -> tuple[bool, list[str]]:
    """Return whether Slurm starts a program of ours, and what to take out; raise InstallError."""
    paths = HookPaths(prefix / CURRENT)
    conf = site.best()
    ours = [one for one in find_plugstack(conf, site.conf).ours if one.path == prefix / PLUGIN]
    here = site.conf if site.conf and site.conf.is_file() else None
    lines = list_gpulock_lines(here, paths, settings) if here else []
    programs = [f"from {one.file}: {' '.join([str(one.path), *one.words])}" for one in ours]
    for read in [conf, *([site.in_file()] if here else [])]:
        programs += list_hook_programs(read, paths, site.conf, lines)
    leading = bool(programs) or any(line.leads for line in lines)
    return leading, [*removal_page(lines), *dict.fromkeys(programs)]
