# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm`: take this node's part away, once Slurm no longer leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpulock.install.change import Place, install_record
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.slurm.configured_hooks import find_slurm_hooks
from gpulock.install.slurm.gres import GresCopy
from gpulock.install.slurm.site import find_slurm_site, find_slurmds, slurmds_of_site
from gpulock.install.slurm.texts import hook_removal_page
from gpulock.install.undo import FORCE, Address, Uninstaller
from gpulock.install.versions import CURRENT, list_locked_devices
from gpulock.node.settings import Settings
from gpulock.store.locks import LockStore


class SlurmUninstaller(Uninstaller):
    """Slurm's part of a node."""

    scheduler = "slurm"

    def obstacles(self) -> Iterator[tuple[str, str]]:
        if held := held_by_slurm(Path(self.settings.lock_dir)):
            what = f"Slurm jobs hold {len(held)} devices ({' '.join(held)})"
            yield what, f": wait for them, or {FORCE}"
        records = [self.record, install_record(self.settings, "sge")]
        prefixes = [Path(a[1]) for one in records for a in one.load() if a[0] == "hooks"]
        for prefix in dict.fromkeys(prefixes):
            try:
                lines = slurm_hook_references(self.settings, self.given, prefix)
            except InstallError as fault:
                yield f"whether Slurm still starts the hooks cannot be found out: {fault}", ""
                continue
            for line in lines:
                self.echo(line)
            if lines:
                yield (
                    "Slurm still starts the hooks, and without them drains its nodes",
                    "; take out what is named above, everywhere, then scontrol reconfigure, and"
                    " run it again",
                )

    def place(self, address: Address) -> Place:
        if address[0] == GresCopy.kind:
            return GresCopy(Path(address[1]), Path(address[2]))
        return super().place(address)


def held_by_slurm(lock_dir: Path) -> list[str]:
    """Return the devices that Slurm jobs hold, or of which the holder cannot be told."""
    store = LockStore(str(lock_dir))
    return [
        name
        for name in list_locked_devices(lock_dir)
        if (owner := store.read(name).owner) is None or owner.scheduler == "slurm"
    ]


def slurm_hook_references(settings: Settings, given: frozenset[str], prefix: Path) -> list[str]:
    """Return what leads Slurm to our hooks and must go first; raise InstallError."""
    paths = HookPaths(prefix / CURRENT)
    site = find_slurm_site(settings, given, slurmds_of_site(find_slurmds(), settings))
    return hook_removal_page(find_slurm_hooks(site.best(), paths), paths)
