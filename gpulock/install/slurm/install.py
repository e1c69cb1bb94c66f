# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm`: this node's part.

On the node: the hooks, the settings, the map of slurmd's positions. slurm.conf and gres.conf are
the cluster's, and are only read unless --write-conf is given: what to put there is said.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpulock.install.change import FilePlace, install_record
from gpulock.install.daemons import process_start_time
from gpulock.install.hooks import HookPaths, InstallError, real_interpreter
from gpulock.install.planner import InstallPlan, NodePlanner
from gpulock.install.slurm import gres, texts
from gpulock.install.slurm.configured_hooks import TASK, find_slurm_hooks
from gpulock.install.slurm.counted import place_gres_page
from gpulock.install.slurm.plugstack import PLUGIN, PlugStack, find_plugstack, plugstack_page
from gpulock.install.slurm.site import (
    SlurmError,
    find_slurm_site,
    find_slurmds,
    slurm_release_fault,
    slurmds_of_site,
)
from gpulock.install.slurm.slurm_conf import SlurmConf, find_slurm_includes
from gpulock.install.slurm.spank import SpankPlugin, find_compiler, find_spank_header
from gpulock.install.slurm.write_conf import (
    check_other_nodes,
    plan_slurm_conf,
    slurm_conf_after,
    wanted_slurm_keys,
)
from gpulock.install.trial import check_hook_interpreter, rival_hook_reason, try_slurm_hooks
from gpulock.install.trial_job import run_slurm_trial
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX, InstalledHooks
from gpulock.node.context import Node
from gpulock.node.setting_keys import KEYS
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.slurm.gres_map import NAME, needs_gres_map

_BINARIES: Final = next(default for name, _, default, _ in KEYS if name == "SLURM_BINARIES")
NO_GRES: Final = (
    "slurmd has no gres/gpu with File= on this node, so no job gets a GPU here; if it should, look"
    " at NodeName= and File= in gres.conf, and at Gres= of the node in slurm.conf"
)


@dataclass(frozen=True)
class SlurmOptions:
    """What the administrator asks for; what is None or empty is found out."""

    gpus: int | None = None
    node: str = ""
    prefix: Path = DEFAULT_PREFIX
    config: Path = Path(DEFAULT_PATH)
    interpreter: str = sys.executable
    spank: bool = False
    enroot: bool = False
    podman: bool = False
    docker: bool = False
    quarantine_on: str | None = None
    write_conf: bool = False
    installed_everywhere: bool = False


def plan_slurm(options: SlurmOptions) -> InstallPlan:
    """Return what must change on this node, and what to say; raise InstallError."""
    return SlurmPlanner(options).plan()


class SlurmPlanner(NodePlanner):
    """Find out what is there, step by step."""

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options.config, "slurm")
        self.options = options
        self.slurmds = slurmds_of_site(find_slurmds(), self.settings)
        self.site = find_slurm_site(self.settings, self.given, self.slurmds, options.node)
        paths = HookPaths(options.prefix / CURRENT)
        self.plugin = SpankPlugin(
            options.prefix / PLUGIN,
            paths.slurm_task,
            self.site,
            real_interpreter(options.interpreter),
        )
        installed = install_record(self.settings, "slurm").load()
        self.by_spank = options.spank or self.plugin.address in installed  # once chosen, it stays

    def plan(self) -> InstallPlan:
        """Return the whole plan."""
        options = self.options
        if why := slurm_release_fault(self.site.release()):
            raise InstallError(f"{why}: nothing was installed (docs/slurm.md)")
        check_hook_interpreter(real_interpreter(options.interpreter))
        if not self.slurmds:
            path = self.site.conf or "an unknown slurm.conf"
            self.note(f"no slurmd runs here: the map is of what it will find in {path}")
        conf = self.conf()
        stack = find_plugstack(conf, self.site.conf)
        if stack.pyxis and not self.by_spank:
            raise InstallError(
                f"{stack.pyxis.file} names pyxis, in whose containers no TaskProlog works: run it"
                " with --spank (docs/containers.md)"
            )
        self.add_folders()
        gpus = self.count_gpus(options.gpus, needed=False)
        counted = {"EXPECTED_GPUS": str(gpus)} if gpus else {}
        asked = self.quarantine_keys(options.quarantine_on) | self.cdi_keys(options.docker)
        self.add_settings(counted | self.way_to_slurm() | asked, texts.NEW_SETTINGS)
        lock_dir = Path(self.settings.lock_dir)
        hooks = InstalledHooks(
            options.prefix, options.config, options.interpreter, lock_dir, try_slurm_hooks
        )
        self.add_hooks(hooks)
        if self.by_spank:
            wanted = self.plugin.wanted(self.site.release())
            if self.plugin.read() != wanted:
                find_compiler()  # what lacks is told before a change
                find_spank_header(self.site)
            self.add_own(self.plugin, wanted)
        self.add_enroot(options.enroot)
        self.add_podman(options.podman, options.interpreter)
        self.add_docker(options.docker)
        self.source = gres.read_gres_source(self.site)  # before the list: a change is seen later
        listed = gres.read_gres_list(self.site)
        self.check_shares(listed.shared)
        self.add_map(listed.entries, listed.shared)
        if options.write_conf:
            conf = self.write_conf(conf)
        self.pages(listed, conf, stack)
        found = find_slurm_hooks(conf, HookPaths(options.prefix / CURRENT), self.site.conf)
        starts = all(hook.ours or (self.by_spank and hook.key == TASK) for hook in found)
        if not starts:
            self.note("no job is protected before slurm.conf has the lines below, and is in force")
        elif not gres.counts_by_gres(self.settings):
            self.note("no trial job is run: SLURM_COUNT=slurmctld, by which --gres=gpu:1 is none")
        elif self.slurmds:
            self.plan_.trial = partial(run_slurm_trial, self.site, self.site.node_names()[0])
        return self.plan_

    def write_conf(self, conf: SlurmConf) -> SlurmConf:
        """Add our lines to slurm.conf; return what is in force then; raise InstallError."""
        paths = HookPaths(self.options.prefix / CURRENT)
        where = (paths, self.settings, self.by_spank)
        lacks = wanted_slurm_keys(conf, *where, self.site.conf)
        changes = plan_slurm_conf(self.site, lacks, *where)
        if changes:
            check_other_nodes(self.site, self.options.installed_everywhere)
        self.add(changes)
        return slurm_conf_after(conf, lacks)

    def way_to_slurm(self) -> dict[str, str]:
        """Return the settings that lead to Slurm, where it is not at its usual place."""
        found: dict[str, str] = {}
        if str(self.site.binaries) != _BINARIES:
            found["SLURM_BINARIES"] = str(self.site.binaries)
        started = {slurmd.conf for slurmd in self.slurmds if slurmd.conf}
        if self.site.conf and str(self.site.conf) in started:
            found["SLURM_CONF"] = str(self.site.conf)
        return found

    def check_shares(self, shared: tuple[str, ...]) -> None:
        """Raise InstallError for parts of GPUs, unless the site says what becomes of such jobs."""
        if shared and "SLURM_SHARDS" not in self.given:
            raise InstallError(
                f"slurmd gives out parts of GPUs here (gres/{', gres/'.join(shared)}): in"
                f" {self.config_path} set SLURM_SHARDS=share, by which shard jobs share a card's"
                " lock, or SLURM_SHARDS=refuse, by which such a job ends with the reason"
            )

    def add_map(self, entries: list[gres.GresEntry], shared: tuple[str, ...]) -> None:
        """Write the map, which names the version of gres.conf that it was compared with."""
        wanted = gres.gres_positions(entries)
        if not wanted and gres.counts_by_gres(self.settings):
            why = gres.find_unlisted_gpus(self.site)
            if why and needs_gres_map(Node(self.settings).devices_if_driver(), self.settings):
                first = "" if self.slurmds else "start slurmd first, whose libraries count; "
                raise InstallError(f"{why}; {first}{gres.LOOK_AT_LIST}")
            self.note(f"{why}; {gres.LOOK_AT_LIST}" if why else NO_GRES)
        places, unread = gres.map_places(self.settings, wanted)
        if unread:
            self.note(unread)
        text = gres.slurm_map_text(self.source, places, shared, self.options.node)
        place = FilePlace(Path(self.settings.state_dir, NAME))
        if self.source is not None:
            self.note_gres(self.source.path)
            if place.read() != text:
                self.note_age(self.source.path)
        self.add_own(place, text)

    def note_gres(self, source: Path) -> None:
        """Say which change of gres.conf is not noticed."""
        if named := find_slurm_includes(source):
            self.note(
                f"{source} includes {' '.join(named)}: when that changes, run install slurm again"
                " (a change of gres.conf itself is seen by the hooks)"
            )

    def note_age(self, source: Path) -> None:
        """Say that slurmd may still go by another gres.conf than the map."""
        try:
            began = max([process_start_time(slurmd.pid) for slurmd in self.slurmds], default=0.0)
        except (OSError, ValueError):
            return
        if began and source.stat().st_mtime > began:
            self.note(
                f"{source} is younger than slurmd: if no scontrol reconfigure was run since, run it"
                " now, before the next GPU job starts here"
            )

    def pages(self, listed: gres.GresList, conf: SlurmConf, stack: PlugStack) -> None:
        """Say what to put into the cluster's own files."""
        paths = HookPaths(self.options.prefix / CURRENT)
        hooks = find_slurm_hooks(conf, paths, self.site.conf)
        in_conf = [hook for hook in hooks if not (self.by_spank and hook.key == TASK)]
        pages = [texts.slurm_conf_page(conf, in_conf, paths, self.settings)]
        advice = texts.slurm_setting_advice(conf, self.settings)
        self.plan_.lacking = len([hook for hook in in_conf if not hook.ours])
        self.plan_.lacking += len([want for want in advice if want.needed])
        if self.by_spank:
            task = next(hook for hook in hooks if hook.key == TASK)
            pages.append(plugstack_page(stack, self.plugin.path, task, paths))
        if self.settings.slurm_device_selection == "gpulock":
            path = self.site.gres_conf
            if self.settings.slurm_count == "gpus" and not (
                path and gres.has_gres_flag(path, self.site.node_names())
            ):
                pages.append(texts.gres_conf_page(listed.entries, path))
            found = Node(self.settings).devices_if_driver()
            node = self.site.node_names()[0]
            pages.append(place_gres_page(self.settings, found, listed.counted, node))
        pages.append(texts.job_submit_lua_page(conf))
        self.plan_.pages += [page for page in pages if page]
        for hook in hooks:
            for path in hook.others:
                if why := rival_hook_reason(str(path)):
                    text = f"does {hook.key} {path} hand out GPUs itself ({why})? Then take it out"
                    self.note(text)

    def conf(self) -> SlurmConf:
        """Return what is in force, or what slurm.conf says where slurmctld does not answer."""
        try:
            return self.site.in_force()
        except SlurmError as silent:
            conf = self.site.in_file()
            self.note(f"{silent}: compared with {conf.source}, which may not be in force")
            return conf
