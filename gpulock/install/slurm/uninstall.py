# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm`: the items of this node, and with --write-conf the block in slurm.conf.

A hook stays while Slurm leads to it: a node without one is drained. The hooks of both schedulers
are one folder, which goes with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpulock.install.change import FilePlace
from gpulock.install.container_hooks import container_items
from gpulock.install.hooks import HookPaths, InstallError, real_interpreter
from gpulock.install.installed import find_sge_installation, find_slurm_installation
from gpulock.install.items import InstallParts, Item, PlaceItem, Remainder, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.slurm.conf_item import UNSURE, ConfRequest, SlurmConfItem
from gpulock.install.slurm.hooks_item import SlurmHooks
from gpulock.install.slurm.plugstack import PLUGIN
from gpulock.install.slurm.site import find_slurm_site, find_slurmds, slurmds_of_site
from gpulock.install.slurm.spank import SpankPlugin
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX, InstalledHooks, version_in_force
from gpulock.slurm.gres_map import NAME


@dataclass(frozen=True)
class SlurmRemoval:
    """What the administrator asks for; without a prefix, where the hooks are."""

    config: Path
    prefix: Path | None = None
    write_conf: bool = False
    force: bool = False


class UnknownSlurm(Item):
    """Stands for a Slurm that is not to be found, and may start the hooks all the same."""

    title = "Slurm"

    def __init__(self, why: str, needs: tuple[Item, ...]) -> None:
        self.why, self.needs = why, needs

    def remainder(self, wanted: Wanted) -> Remainder | None:
        del wanted
        return Remainder(f"{UNSURE}: {self.why}")


class SlurmRemover(NodePart):
    """Find out what of gpulock is here for Slurm."""

    def __init__(self, asked: SlurmRemoval) -> None:
        super().__init__(asked.config, "slurm")
        self.asked = asked
        here = find_slurm_installation(self.settings)
        self.prefix = asked.prefix or (here.prefix if here else DEFAULT_PREFIX)
        self.is_here = here is not None or version_in_force(self.prefix) is not None

    def parts(self) -> InstallParts:
        """Return the items; those that Grid Engine needs as well are left to it."""
        positions = PlaceItem(FilePlace(Path(self.settings.state_dir, NAME)), "")
        place = InstalledHooks(
            self.prefix, self.asked.config, real_interpreter(), Path(self.settings.lock_dir)
        )
        hooks = SlurmHooks(place, "", (positions,), self.asked.force)
        plugin = SpankPlugin(self.prefix / PLUGIN, needs=(hooks,))
        containers = container_items()
        settings = PlaceItem(FilePlace(self.config_path), "", stays=True)
        items: list[Item] = [settings, positions, hooks, plugin, *containers]
        if sge := find_sge_installation(self.settings):  # it then has the others too
            self.note("the hooks stay: Grid Engine uses them")
            kept = [*containers, *([hooks] if sge.prefix == self.prefix else [])]
            items = [item for item in items if item not in kept]
        return InstallParts([*items, *self.configuration((hooks, plugin))], self.notes)

    def configuration(self, needs: tuple[Item, ...]) -> list[Item]:
        """Return Slurm's configuration as an item; nothing where no gpulock is here."""
        if not (self.is_here or self.asked.write_conf):
            return []
        try:
            slurmds = slurmds_of_site(find_slurmds(), self.settings)
            site = find_slurm_site(self.settings, self.given, slurmds)
        except InstallError as fault:
            return [] if self.asked.force else [UnknownSlurm(str(fault), needs)]
        paths = HookPaths(self.prefix / CURRENT)
        asked = self.asked
        request = ConfRequest(paths, write=asked.write_conf, force=asked.force)
        return [SlurmConfItem(site, self.settings, request, needs)]
