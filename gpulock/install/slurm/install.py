# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm`: what must change on this node, and what to put into the cluster's files.

On the node: the hooks, the settings, the map of slurmd's positions. slurm.conf and gres.conf are
the cluster's, and are only read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install import commands
from gpulock.install.change import Change, FilePlace, FolderPlace, InstallRecord, plan_place_change
from gpulock.install.hooks import HookPaths, InstallError, real_interpreter
from gpulock.install.sge.install import InstallPlan, current_settings
from gpulock.install.slurm.configured_hooks import find_slurm_hooks
from gpulock.install.slurm.gres import (
    GresDeviceFiles,
    GresEntry,
    counts_by_gres,
    gres_positions,
    read_gres_entries,
    slurm_map_text,
)
from gpulock.install.slurm.gres_copy import (
    GresCopy,
    find_gres_conf,
    gres_conf_identity,
    has_gres_flag,
)
from gpulock.install.slurm.hook_trial import SlurmHooks, check_hook_interpreter
from gpulock.install.slurm.site import (
    Slurmd,
    SlurmError,
    SlurmSite,
    find_slurm_site,
    find_slurmds,
    process_start_time,
    slurmds_of_site,
)
from gpulock.install.slurm.slurm_conf import SlurmConf, find_slurm_includes
from gpulock.install.slurm.snippets import gres_conf_page, job_submit_lua_page, slurm_settings_text
from gpulock.install.slurm.texts import slurm_conf_page
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX
from gpulock.node import devices
from gpulock.node.config_schema import KEYS
from gpulock.node.settings import DEFAULT_PATH, Settings, parse_settings
from gpulock.slurm.gres_map import COPY, NAME

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


@dataclass
class SlurmPlan(InstallPlan):
    """The changes on this node, and the pages on what the administrator changes himself."""

    pages: list[list[str]] = field(default_factory=list[list[str]])


def slurm_install_record(settings: Settings) -> InstallRecord:
    """Return where it is noted what was installed for Slurm."""
    return InstallRecord(Path(settings.state_dir, "install/slurm.json"))


def plan_slurm(options: SlurmOptions) -> SlurmPlan:
    """Return what must change on this node, and what to say; raise InstallError."""
    settings, given = current_settings(options.config)
    slurmds = slurmds_of_site(find_slurmds(), settings)
    site = find_slurm_site(settings, given, slurmds, options.node)
    return SlurmPlanner(options, settings, given, slurmds, site).plan()


class SlurmPlanner:
    """Find out what is there, step by step."""

    def __init__(
        self,
        options: SlurmOptions,
        settings: Settings,
        given: frozenset[str],
        slurmds: list[Slurmd],
        site: SlurmSite,
    ) -> None:
        self.options = options
        self.settings = settings
        self.given = given
        self.slurmds = slurmds
        self.site = site
        self.plan_ = SlurmPlan(slurm_install_record(settings))

    def plan(self) -> SlurmPlan:
        """Return the whole plan."""
        add = self.plan_.changes.extend
        check_hook_interpreter(real_interpreter(self.options.interpreter))
        if not self.slurmds:
            conf = self.site.conf or "an unknown slurm.conf"
            self.note(f"no slurmd runs here: the map is of what it will find in {conf}")
        for folder in (self.settings.lock_dir, self.settings.state_dir):
            add(self.folder(Path(folder)))
        add(self.config())
        hooks = SlurmHooks(
            self.options.prefix,
            self.options.config,
            self.options.interpreter,
            Path(self.settings.lock_dir),
        )
        add(plan_place_change(hooks, hooks.wanted()))
        entries = read_gres_entries(self.site)
        add(self.map(entries))
        self.pages(entries)
        return self.plan_

    def note(self, text: str) -> None:
        """Tell the administrator something."""
        self.plan_.notes.append(text)

    def folder(self, path: Path) -> Iterable[Change]:
        """Make LOCK_DIR or STATE_DIR; one that is there is left to `doctor`."""
        place = FolderPlace(path)
        return plan_place_change(place, "uid 0, mode 0755") if place.read() is None else ()

    def config(self) -> Iterable[Change]:
        """Add to the settings what a hook must know, and write them where there are none."""
        wanted = {
            **({"EXPECTED_GPUS": str(gpus)} if (gpus := self.gpus()) else {}),
            **self.way_to_slurm(),
        }
        place = FilePlace(self.options.config)
        text = slurm_settings_text(place.read(), wanted, self.given)
        try:
            parse_settings(text, str(self.options.config))
        except ValueError as fault:
            raise InstallError(f"{fault}; correct the file") from fault
        return plan_place_change(place, text)

    def way_to_slurm(self) -> dict[str, str]:
        """Return the settings that lead to Slurm, where it is not at its usual place."""
        found: dict[str, str] = {}
        if str(self.site.binaries) != _BINARIES:
            found["SLURM_BINARIES"] = str(self.site.binaries)
        started = {slurmd.conf for slurmd in self.slurmds if slurmd.conf}
        if self.site.conf and str(self.site.conf) in started:
            found["SLURM_CONF"] = str(self.site.conf)
        return found

    def gpus(self) -> int:
        """Return how many GPUs this node must have, 0 for a node without."""
        asked, stated = self.options.gpus, self.settings.expected_gpus
        if asked and stated and asked != stated:
            raise InstallError(
                f"{self.options.config} says EXPECTED_GPUS={stated}, not {asked}; change it"
            )
        try:
            shown = len(devices.read_devices(self.settings.driver_root, self.settings.sys_root))
        except Refusal as refusal:
            self.note(f"{refusal.why}: no GPU job will start here; {refusal.do}")
            return asked or stated
        count = asked or stated or shown
        if count != shown:
            self.note(f"the driver shows {shown} GPUs, not {count}: see gpulock doctor")
        return count

    def map(self, entries: list[GresEntry]) -> Iterable[Change]:
        """Write the map, then the copy: between the two a prolog sees a stale map, no wrong one."""
        wanted = gres_positions(entries)
        source = find_gres_conf(self.site)
        if not wanted and counts_by_gres(self.settings):
            self.note(NO_GRES)
        before = gres_conf_identity(source) if source else None
        try:
            places = GresDeviceFiles(self.settings).devices_of_positions(wanted)
        except InstallError as fault:
            if self.settings.slurm_device_selection == "slurm":
                raise
            self.note(f"no map of Slurm's positions, which gpulock's choice does not need: {fault}")
            return
        folder = Path(self.settings.state_dir)
        yield from plan_place_change(FilePlace(folder / NAME), slurm_map_text(source, places))
        if source is not None:
            self.note_gres(source)
            for change in plan_place_change(GresCopy(folder / COPY, source), before):
                self.note_age(source)
                yield change

    def note_gres(self, source: Path) -> None:
        """Say what the copy of gres.conf does not show."""
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

    def pages(self, entries: list[GresEntry]) -> None:
        """Say what to put into the cluster's own files."""
        paths = HookPaths(self.options.prefix / CURRENT)
        conf = self.conf()
        hooks = find_slurm_hooks(conf, paths)
        pages = [slurm_conf_page(conf, hooks, paths, self.settings)]
        if self.settings.slurm_device_selection == "gpulock":
            gres = self.site.gres_conf
            if self.settings.slurm_count == "gpus" and not (gres and has_gres_flag(gres)):
                pages.append(gres_conf_page(entries, gres))
            if self.settings.slurm_count == "comment":
                pages.append(job_submit_lua_page(self.settings.slurm_gres))
        self.plan_.pages += [page for page in pages if page]
        for hook in hooks:
            for path in hook.others:
                if why := commands.rival_hook_reason(str(path)):
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
