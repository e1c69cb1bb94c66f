# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and `uninstall slurm`: this node's part, and a block with --write-conf.

On the node: the hooks, the settings, the map of slurmd's positions. slurm.conf and gres.conf are
the cluster's, and are only read unless --write-conf is given: what to put there is said. A hook
stays while Slurm leads to it: a node without one is drained. The hooks of both schedulers are one
folder, which goes with the last of them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Final

from gpulock.install.container_hooks import choose_container_hooks, container_items
from gpulock.install.files import InstallError
from gpulock.install.items import ByHand, FileItem, InstallParts, Item, Remainder
from gpulock.install.node_part import NodePart
from gpulock.install.slurm import gres, texts
from gpulock.install.slurm.conf_item import UNSURE, SlurmConfItem, SlurmOptions
from gpulock.install.slurm.configured_hooks import TASK, find_slurm_hooks
from gpulock.install.slurm.site import (
    Slurmd,
    SlurmSite,
    find_own_slurmd,
    find_slurm_site,
)
from gpulock.install.slurm.spank import PYXIS, PlugStack, SpankPlugin
from gpulock.install.versions import (
    SGE,
    SLURM,
    Hooks,
    current_hooks,
    held_devices_item,
    hooks_folder,
    installed_schedulers,
    is_to_uninstall,
)
from gpulock.node.context import Node
from gpulock.node.setting_keys import KEYS
from gpulock.slurm.gres_map import NAME, needs_gres_map

_BINARIES: Final = next(default for name, _, default, _ in KEYS if name == "SLURM_BINARIES")
NO_GRES: Final = (
    "slurmd has no gres/gpu with File= on this node, so no job gets a GPU here; if it should, look"
    " at NodeName= and File= in gres.conf, at Gres= of the node and GresTypes=gpu in slurm.conf"
)


class SlurmInstaller(NodePart):
    """Find out what is to be there on this node, or to go from it."""

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options.config, "slurm")
        self.options = options
        self.paths = current_hooks(self.settings)

    @cached_property
    def slurmd(self) -> Slurmd | None:
        """The slurmd of this node; raises InstallError for several."""
        return find_own_slurmd(self.settings)

    @cached_property
    def site(self) -> SlurmSite:
        """This node's Slurm; raises InstallError."""
        return find_slurm_site(self.settings, self.slurmd)

    @cached_property
    def plugin(self) -> SpankPlugin:
        """The SPANK plugin."""
        return SpankPlugin(hooks_folder(self.settings), self.paths.slurm_task)

    @property
    def by_spank(self) -> bool:
        """Whether the plugin is chosen: it is there."""
        return self.plugin.path.exists()

    def parts(self) -> InstallParts:
        """Return all items; raise InstallError for what cannot be installed here."""
        options = self.options
        conf_alone = options.write_conf and not (self.slurmd or self.site.split_nodes()[0])
        if why := self.site.release_fault():
            raise InstallError(f"{why}: nothing was installed (docs/slurm.md)")
        if conf_alone:
            self.note("this machine is no node of slurmctld's: only slurm.conf is written here")
        elif not self.slurmd:
            path = self.site.conf or "an unknown slurm.conf"
            self.note(f"no slurmd runs here: the map is of what it will find in {path}")
        conf = self.site.best()
        if conf.silent:
            what = f"compared with {conf.source}, which may not be in force"
            self.note(f"{conf.silent}: {what}")
        stack, plugin = PlugStack(conf, self.site.conf), self.plugin.path
        if (pyxis := stack.naming(PYXIS)) and not self.by_spank:
            raise InstallError(
                f"{pyxis[0][0]} names pyxis, in whose containers no TaskProlog works: compile"
                " the SPANK plugin as shown above, and run it again (docs/containers.md)",
                self.plugin.page(),
            )
        items = [] if conf_alone else self.node_items()
        items += [self.plugin] if self.by_spank else []
        hooks = find_slurm_hooks(conf, self.paths, self.site.conf)
        tasks = [hook for hook in hooks if hook.key == TASK and hook.ours]
        # what runs tasks' hook stays until the plugin does
        needs_task = not self.by_spank or (tasks and stack.remainder(plugin))
        item = SlurmConfItem(self.site, self.settings, options, by_spank=not needs_task)
        wanted = item.wanted(conf)
        if options.write_conf:  # what is left to say once the block is in force
            wanted = [line for line in wanted if not line.needed]
        items.append(item)
        if self.by_spank:
            items.append(ByHand(str(stack.path), lambda: stack.remainder(plugin)))
        pages = [page] if (page := texts.slurm_conf_page(wanted)) else []
        return InstallParts(items, self.notes, pages, self.try_line(), on_node=not conf_alone)

    def node_items(self) -> list[Item]:
        """Return what each node has; raise InstallError."""
        settings = self.settings_item()
        source = gres.read_gres_source(self.site)  # before the list: a change is seen later
        listed = gres.parse_gres_list(self.site.gres())
        self.check_shares(listed.shared)
        flagged = source and gres.has_gres_flag(source.path, self.site.node)
        if not flagged and not gres.by_slurm(self.settings):
            self.note(
                f"{self.site.gres_conf or 'gres.conf'} needs Flags=no_gpu_env on every Name=gpu"
                " line, or Slurm names other cards to jobs than gpulock locks; then restart slurmd"
                " and slurmctld, without a scontrol reconfigure before (docs/slurm.md)"
            )
        items: list[Item] = [settings, self.map_item(source, listed), Hooks(self.settings, SLURM)]
        return [*items, *choose_container_hooks(self.options.enroot, self.options.podman)]

    def removal(self) -> InstallParts:
        """Return the items, of which the last goes first; those of Grid Engine are left to it."""
        if not (is_to_uninstall(self.settings, SLURM) or self.options.write_conf):
            return InstallParts([], on_node=False)
        positions = FileItem(Path(self.settings.state_dir, NAME), "")
        items: list[Item] = [FileItem(self.config_path, "", stays=True), positions]
        if SGE in installed_schedulers(self.settings):  # it then has the others, too
            self.note("the hooks stay: Grid Engine uses them")
        else:
            items += [*container_items(), Hooks(self.settings)]
        items += [self.plugin, held_devices_item(self.settings, SLURM, self.options.force)]
        try:
            items.append(SlurmConfItem(self.site, self.settings, self.options))
        except InstallError as fault:
            unsure = Remainder(f"{UNSURE}: {fault}")
            items += [] if self.options.force else [ByHand("Slurm", lambda: unsure)]
        return InstallParts(items, self.notes)

    def settings_item(self) -> FileItem:
        """Return the settings file, with the keys that it lacks; it stays."""
        gpus = self.count_gpus()
        counted = {"EXPECTED_GPUS": str(gpus)} if gpus else dict[str, str]()
        if str(self.site.binaries) != _BINARIES:  # not at its usual place
            counted["SLURM_BINARIES"] = str(self.site.binaries)
        if self.slurmd and self.slurmd.conf:
            counted["SLURM_CONF"] = self.slurmd.conf
        return self.settings_file_item(counted)

    def try_line(self) -> str:
        """Return the job by which an ordinary user sees the mask, nothing without slurmd."""
        if not self.slurmd:
            return ""
        return (
            f"srun --nodelist={self.site.node} --gres=gpu:1 /usr/bin/printenv CUDA_VISIBLE_DEVICES"
        )

    def check_shares(self, shared: tuple[str, ...]) -> None:
        """Raise InstallError for parts of GPUs, unless the site says what becomes of such jobs."""
        if shared and "SLURM_SHARDS" not in self.settings.given:
            raise InstallError(
                f"slurmd gives out parts of GPUs here (gres/{', gres/'.join(shared)}): in"
                f" {self.config_path} set SLURM_SHARDS=share, by which shard jobs share a card's"
                " lock, or SLURM_SHARDS=refuse, by which such a job ends with the reason"
            )

    def map_item(self, source: gres.GresSource | None, listed: gres.GresList) -> FileItem:
        """Return the map, which names the version of gres.conf that it was compared with."""
        if not listed.positions:
            why = gres.find_unlisted_gpus(self.site)
            if why and needs_gres_map(Node(self.settings).devices_if_driver(), self.settings):
                first = "" if self.slurmd else "start slurmd first, whose libraries count; "
                raise InstallError(f"{why}; {first}{gres.LOOK_AT_LIST}")
            self.note(f"{why}; {gres.LOOK_AT_LIST}" if why else NO_GRES)
        places, unread = gres.map_places(self.settings, listed.positions)
        if unread:
            self.note(unread)
        text = gres.slurm_map_text(source, places, listed.shared)
        item = FileItem(Path(self.settings.state_dir, NAME), text)
        if item.read() != text and not gres.has_slurmd_read(self.slurmd, self.site.conf, source):
            self.note(
                f"{source.path if source else self.site.conf} is younger than slurmd: if no"
                " scontrol reconfigure was run since, run it now, before the next GPU job starts"
            )
        return item
