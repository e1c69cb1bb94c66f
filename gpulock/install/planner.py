# SPDX-License-Identifier: Apache-2.0
"""What every installation plans on the node itself: folders, settings, the number of its GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from gpulock.install.change import (
    Change,
    Entries,
    FilePlace,
    FolderPlace,
    InstallRecord,
    Place,
    apply_changes,
    install_record,
    plan_place_change,
)
from gpulock.install.container_hooks import choose_container_hooks, docker_pages
from gpulock.install.hooks import real_interpreter
from gpulock.install.node_part import NodePart
from gpulock.install.versions import InstalledHooks


@dataclass
class InstallPlan:
    """The changes in the order they are made, and what the administrator should know.

    `own` are the places that are gpulock's own, with their values, whether they change or not.
    `trial` runs a job by what was installed, and returns what came of it; None: none can be run.
    """

    record: InstallRecord
    changes: list[Change] = field(default_factory=list[Change])
    notes: list[str] = field(default_factory=list[str])
    pages: list[list[str]] = field(default_factory=list[list[str]])  # to be changed by hand
    own: Entries = field(default_factory=Entries)
    trial: Callable[[], str] | None = None

    def apply(self, echo: Callable[[str], None]) -> None:
        """Make all changes; raise InstallError at the first that fails.

        STATE_DIR comes first: what keeps others away is in it.
        """
        folders = list(takewhile(lambda one: one.place.kind == FolderPlace.kind, self.changes))
        for change in folders:
            change.apply()
            echo(f"done: {change.what}")
        rest = self.changes[len(folders) :]
        if rest or self.own.items() - self.record.load().items():
            apply_changes(rest, self.record, echo, self.own)


class NodePlanner(NodePart):
    """The node's part of a plan, which each scheduler goes on with."""

    def __init__(self, config: Path, scheduler: str) -> None:
        super().__init__(config, scheduler)
        self.plan_ = InstallPlan(install_record(self.settings, scheduler), notes=self.notes)

    def add(self, changes: Iterable[Change]) -> None:
        """Add changes to the plan."""
        self.plan_.changes += changes

    def add_own(self, place: Place, value: str) -> None:
        """Give a place of gpulock's own its value; an uninstallation removes it."""
        self.plan_.own[place.address] = value
        self.add(plan_place_change(place, value))

    def add_folders(self) -> None:
        """Make LOCK_DIR and STATE_DIR; one that is there is left to `doctor`."""
        for path in (self.settings.lock_dir, self.settings.state_dir):
            place = FolderPlace(Path(path))
            if place.read() is None:
                self.add(plan_place_change(place, f"uid {os.geteuid()}, mode 0755"))

    def add_hooks(self, hooks: InstalledHooks) -> None:
        """Put the hooks in force."""
        self.add_own(hooks, hooks.wanted())

    def add_settings(self, wanted: dict[str, str], new: str = "") -> None:
        """Add to the settings file what a hook must know; raise InstallError."""
        self.add(plan_place_change(FilePlace(self.config_path), self.settings_text(wanted, new)))

    def add_enroot(self, asked: bool) -> None:
        """Add the hook by which `enroot start` in a job has its mask, where asked; or offer it.

        Raises InstallError where enroot's folder is missing.
        """
        self.add_container_hooks("enroot", asked, real_interpreter())

    def add_podman(self, asked: bool, interpreter: str) -> None:
        """Add the hook by which podman in a job has its mask, likewise."""
        self.add_container_hooks("podman", asked, interpreter)

    def add_container_hooks(self, name: str, asked: bool, interpreter: str) -> None:
        """Add the items of one container program's hook."""
        for item in choose_container_hooks(self, name, asked, interpreter):
            self.add(plan_place_change(item.place, item.value))

    def add_docker(self, asked: bool) -> None:
        """Say how Docker takes the names of CDI, where asked; or offer it. Raises InstallError."""
        self.plan_.pages += docker_pages(self, asked)
