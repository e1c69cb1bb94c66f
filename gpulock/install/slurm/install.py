# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and `uninstall slurm`: this node's part.

On the node: the hooks, the settings, the map of slurmd's positions. slurm.conf and gres.conf are
the cluster's, and are only read: what to put there is said. A hook stays while Slurm leads to it: a
node without one is drained. The hooks of both schedulers are one folder, which goes with the last
of them.
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from pathlib import Path

from gpulock.install.files import InstallError
from gpulock.install.items import ByHand, FileItem, Item, Remainder
from gpulock.install.node_part import SHOW_MASK, NodePart
from gpulock.install.slurm import gres
from gpulock.install.slurm.conf_lines import lines_that_lead_here, missing_lines
from gpulock.install.slurm.site import SlurmSite, find_slurm_site, release_fault
from gpulock.install.slurm.spank import PYXIS, PlugStack
from gpulock.install.versions import (
    PLUGIN,
    SGE,
    SLURM,
    Hooks,
    current_hooks,
    held_devices_item,
    hooks_folder,
    installed_schedulers,
    is_to_uninstall,
)
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import MAP_NAME


class SlurmInstaller(NodePart):
    """Find out what is to be there on this node, or to go from it."""

    def __init__(self, config: Path) -> None:
        super().__init__(config, "slurm")
        self.paths = current_hooks(self.settings)

    @cached_property
    def site(self) -> SlurmSite:
        """This node's Slurm; raises InstallError."""
        return find_slurm_site(self.settings)

    def parts(self) -> list[Item]:
        conf = self.site.in_force()
        if why := release_fault(conf):
            raise InstallError(f"{why}: nothing was installed (docs/slurm.md)")
        items = self.node_items()
        stack = PlugStack(conf, self.site.conf)
        plugin, task = hooks_folder(self.settings) / PLUGIN, self.paths.slurm_task
        by_spank = plugin.exists() or bool(stack.naming(PYXIS))
        if by_spank:  # before TaskProlog may go
            items.append(ByHand("SPANK plugin", lambda: stack.remainder(plugin, task)))
        lines = partial(missing_lines, self.site, self.settings, by_spank)
        items.append(ByHand("slurm.conf", lines))
        if self.site.slurmd:
            self.trial = f"srun --nodelist={self.site.node} --gres=gpu:1 {SHOW_MASK}"
        return items

    def node_items(self) -> list[Item]:
        """Return what each node has; raise InstallError."""
        settings = self.settings_item()
        source = gres.read_gres_source(self.site)  # before the list: a change is seen later
        listed = gres.parse_gres_list(self.site.gres())
        self.check_shares(listed.shared)
        return [settings, self.map_item(source, listed), Hooks(self.settings, SLURM)]

    def removal(self) -> list[Item]:
        """Return the items, of which the last goes first; those of Grid Engine are left to it."""
        if not is_to_uninstall(self.settings, SLURM):
            return []
        positions = Path(self.settings.state_dir, MAP_NAME)
        items: list[Item] = [FileItem(positions, "")]
        gone = f"rm {positions}"
        if SGE in installed_schedulers(self.settings):  # it then has the others, too
            self.note("the hooks stay: Grid Engine uses them")
        else:
            items.append(Hooks(self.settings))
            gone = f"rm -r {positions} {hooks_folder(self.settings)}"
        items.append(held_devices_item(self.settings, SLURM))
        return [*items, ByHand("Slurm", partial(self.what_leads_here, gone))]

    def what_leads_here(self, gone: str) -> Remainder | None:
        """Return what a person has to take out before the hooks may go.

        `gone` takes them away where Slurm has left this node, and nobody can be asked.
        """
        try:
            lines = [*dict.fromkeys(lines_that_lead_here(self.site, self.settings))]
        except InstallError as fault:
            what = f"whether Slurm still starts the hooks cannot be found out: {fault}"
            return Remainder(f"{what}; where it is gone from this node: {gone}")
        do = "take out what is named above, everywhere, then scontrol reconfigure, and run it again"
        return Remainder(f"Slurm still starts the hooks; {do}", lines) if lines else None

    def settings_item(self) -> FileItem:
        """Return the settings file, with the keys that it lacks."""
        gpus = self.count_gpus()
        counted = {"EXPECTED_GPUS": str(gpus)} if gpus else dict[str, str]()
        if str(self.site.binaries) != Settings({}).slurm_binaries:  # not at its usual place
            counted["SLURM_BINARIES"] = str(self.site.binaries)
        if self.site.slurmd and self.site.slurmd.conf:
            counted["SLURM_CONF"] = self.site.slurmd.conf
        return self.settings_file_item(counted)

    def check_shares(self, shared: tuple[str, ...]) -> None:
        """Raise InstallError for parts of GPUs, unless the site says what becomes of such jobs."""
        if shared and "SLURM_SHARDS" not in self.settings.given:
            raise InstallError(
                f"slurmd gives out parts of GPUs here (gres/{', gres/'.join(shared)}): in"
                f" {self.config_path} set SLURM_SHARDS=share, by which shard jobs share a card's"
                " lock, or SLURM_SHARDS=refuse, by which such a job ends with the reason"
            )

    def map_item(self, source: gres.GresSource, listed: gres.GresList) -> FileItem:
        """Return the map, which names the version of gres.conf that it was compared with."""
        places = gres.devices_of_positions(self.settings, listed.positions)
        text = gres.slurm_map_text(source, places, listed.shared)
        item = FileItem(Path(self.settings.state_dir, MAP_NAME), text)
        if not listed.positions:
            advice = f"{gres.NO_GRES}; if one should, {gres.LOOK_AT_LIST}"
            if re.search(r"(?m)^\d+=", item.read() or ""):
                raise InstallError(f"{advice}; if none should any more, rm {item.path} first")
            self.note(advice)
        if item.read() != text and not gres.has_slurmd_read(self.site):
            self.note(
                f"{source.path or self.site.conf} is younger than slurmd: if no scontrol"
                " reconfigure was run since, run it now, before the next GPU job starts"
            )
        return item
