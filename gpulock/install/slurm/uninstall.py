# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm`: the items of this node, and with --write-conf the block in slurm.conf.

A hook stays while Slurm leads to it: a node without one is drained. The hooks of both schedulers
are one folder, which goes with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpulock.install.container_hooks import container_items
from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, InstallParts, Item, Remainder, SettingsFile, Wanted
from gpulock.install.node_part import NodePart
from gpulock.install.slurm.conf_item import UNSURE, ConfRequest, SlurmConfItem
from gpulock.install.slurm.plugstack import PLUGIN
from gpulock.install.slurm.site import find_slurm_site, find_slurmds, slurmds_of_site
from gpulock.install.slurm.spank import SpankPlugin
from gpulock.install.versions import (
    SGE,
    SLURM,
    HeldDevices,
    Hooks,
    current_hooks,
    hooks_folder,
    installed_schedulers,
    version_in_force,
)
from gpulock.slurm.gres_map import NAME


@dataclass(frozen=True)
class SlurmRemoval:
    """What the administrator asks for."""

    config: Path
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

    def parts(self) -> InstallParts:
        """Return the items; those that Grid Engine needs as well are left to it."""
        here, folder = installed_schedulers(self.settings), hooks_folder(self.settings)
        lost_map = not here and version_in_force(folder)
        if not (SLURM in here or lost_map or self.asked.write_conf):
            return InstallParts([])
        positions = FileItem(Path(self.settings.state_dir, NAME), "")
        plugin = SpankPlugin(folder / PLUGIN)
        items: list[Item] = [positions]
        if SGE in here:  # it then has the others, too
            self.note("the hooks stay: Grid Engine uses them")
        else:
            items += [*container_items(), Hooks(self.settings, needs=(positions,))]
        items.append(plugin)
        jobs = HeldDevices(self.settings, SLURM, self.asked.force, tuple(items))
        settings = SettingsFile(self.config_path, "")
        return InstallParts([settings, *items, jobs, *self.configuration(tuple(items))], self.notes)

    def configuration(self, needs: tuple[Item, ...]) -> list[Item]:
        """Return Slurm's configuration as an item."""
        try:
            slurmds = slurmds_of_site(find_slurmds(), self.settings)
            site = find_slurm_site(self.settings, self.given, slurmds)
        except InstallError as fault:
            return [] if self.asked.force else [UnknownSlurm(str(fault), needs)]
        asked = self.asked
        paths = current_hooks(self.settings)
        request = ConfRequest(paths, write=asked.write_conf, force=asked.force)
        return [SlurmConfItem(site, self.settings, request, needs)]
