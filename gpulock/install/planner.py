# SPDX-License-Identifier: Apache-2.0
"""What every installation plans on the node itself: folders, settings, the number of its GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from gpulock.daemon.health.findings import POLICY_WORDS
from gpulock.errors import Refusal
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
from gpulock.install.docker import (
    CDI_FOLDERS,
    DAEMON_JSON,
    dockerd_release,
    find_dockerd,
    plan_docker,
)
from gpulock.install.hooks import InstallError, find_share_folder, real_interpreter
from gpulock.install.versions import InstalledHooks
from gpulock.node import devices
from gpulock.node.settings import Settings, parse_settings
from gpulock.node.settings_file import DEFAULT_PATH, read_settings

ENROOT_HOOKS = Path("/etc/enroot/hooks.d")
ENROOT_HOOK = "97-gpulock.sh"  # before 98-nvidia.sh, which reads what it writes
PODMAN_HOOKS = Path("/usr/share/containers/oci/hooks.d")  # rootless podman looks nowhere else
PODMAN_HOOK, PODMAN_PROGRAM = "97-gpulock.json", "gpulock_mask.py"


@dataclass
class InstallPlan:
    """The changes in the order they are made, and what the administrator should know.

    `own` are the places that are gpulock's own, with their values, whether they change or not.
    `lacking` counts the lines that a file of the cluster must have and does not.
    `trial` runs a job by what was installed, and returns what came of it; None: none can be run.
    """

    record: InstallRecord
    changes: list[Change] = field(default_factory=list[Change])
    notes: list[str] = field(default_factory=list[str])
    pages: list[list[str]] = field(default_factory=list[list[str]])  # to be changed by hand
    own: Entries = field(default_factory=Entries)
    lacking: int = 0
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


def keys_given(text: str | None) -> frozenset[str]:
    """Return the keys that a settings file gives; pure."""
    return frozenset(re.findall(r"(?m)^\s*([A-Z_]+)\s*=", text or ""))


def current_settings(path: Path) -> tuple[Settings, frozenset[str]]:
    """Return the settings as they are, and the keys that the file gives; raise InstallError."""
    text = FilePlace(path).read()
    if text is None:
        return Settings({}, str(path)), frozenset()
    try:
        return read_settings(str(path)), keys_given(text)
    except Refusal as refusal:
        raise InstallError(f"{refusal.why}; {refusal.do}") from refusal


def add_settings(text: str | None, wanted: dict[str, str], scheduler: str, new: str = "") -> str:
    """Return the settings file with the keys added that it lacks; `new` begins a new one; pure."""
    present = keys_given(text)
    added = "".join(f"{name}={value}\n" for name, value in wanted.items() if name not in present)
    if text is None and new:
        return f"{new}{added}"
    if not added:
        return text or ""
    mark = f"# written by gpulock install {scheduler}; a key that stands here already is kept\n"
    gap = "\n" if text and not text.endswith("\n") else ""
    return f"{text or ''}{gap}{mark}{added}"


class NodePlanner:
    """The node's part of a plan, which each scheduler goes on with."""

    def __init__(self, config: Path, scheduler: str) -> None:
        self.config_path, self.scheduler = config, scheduler
        self.settings, self.given = current_settings(config)
        self.plan_ = InstallPlan(install_record(self.settings, scheduler))

    def note(self, text: str) -> None:
        """Tell the administrator something."""
        self.plan_.notes.append(text)

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
        place = FilePlace(self.config_path)
        text = add_settings(place.read(), wanted, self.scheduler, new)
        try:
            path = str(self.config_path)
            faults = parse_settings(text, path, path == DEFAULT_PATH).faults
        except ValueError as fault:
            faults = (str(fault),)
        if faults:
            raise InstallError(f"{'; '.join(faults)}; correct the file")
        self.add(plan_place_change(place, text))

    def quarantine_keys(self, asked: str | None) -> dict[str, str]:
        """Return QUARANTINE_ON where it is asked for; else offer it. Raises InstallError."""
        stated = "QUARANTINE_ON" in self.given
        words = " ".join(self.settings.quarantine_on)
        if asked is None:
            if not stated:
                self.note(
                    f"gpulockd takes a GPU out of service on: {words} (QUARANTINE_ON);"
                    " --quarantine-on WORDS sets it, '' for none"
                )
            return {}
        if unknown := [word for word in asked.split() if word not in POLICY_WORDS]:
            known = " ".join(POLICY_WORDS)
            raise InstallError(f"--quarantine-on: {' '.join(unknown)}: not one of {known}")
        if stated and asked.split() != words.split():
            raise InstallError(f"{self.config_path} says QUARANTINE_ON={words}; change it there")
        return {"QUARANTINE_ON": asked}

    def add_enroot(self, asked: bool) -> None:
        """Add the hook by which `enroot start` in a job has its mask, where asked; or offer it.

        Raises InstallError where enroot's folder is missing.
        """
        place = FilePlace(ENROOT_HOOKS / ENROOT_HOOK, 0o755)
        if self.is_hook_wanted("enroot", place, ENROOT_HOOKS, asked):
            source = find_share_folder() / "prolog/enroot" / ENROOT_HOOK
            self.add_own(place, source.read_text())

    def add_podman(self, asked: bool, interpreter: str) -> None:
        """Add the hook by which podman in a job has its mask, likewise."""
        program = FilePlace(PODMAN_HOOKS / PODMAN_PROGRAM, 0o755)
        hook = FilePlace(PODMAN_HOOKS / PODMAN_HOOK)
        if self.is_hook_wanted("podman", hook, PODMAN_HOOKS.parents[1], asked):
            source = find_share_folder() / "prolog/podman"
            text = (source / PODMAN_PROGRAM).read_text().partition("\n")[2]
            self.add_own(program, f"#!{real_interpreter(interpreter)} -IS\n{text}")
            self.add_own(hook, (source / PODMAN_HOOK).read_text())

    def cdi_keys(self, docker: bool) -> dict[str, str]:
        """Return CDI_DIR where Docker is to take its names; raise InstallError."""
        if docker and "CDI_DIR" in self.given and not self.settings.cdi_dir:
            raise InstallError(
                f"{self.config_path} says CDI_DIR= and --docker needs one; change it"
            )
        return {"CDI_DIR": CDI_FOLDERS[-1]} if docker else {}

    def add_docker(self, asked: bool) -> None:
        """Have Docker take the names of CDI, where asked; or offer it. Raises InstallError."""
        dockerd = find_dockerd()
        if not asked:
            if dockerd and not self.settings.cdi_dir:
                self.note("docker knows no GPU of a job: --docker has it take $GPULOCK_CDI")
            return
        if dockerd is None:
            raise InstallError("no dockerd: --docker changes its daemon.json; install Docker")
        folder = self.settings.cdi_dir or CDI_FOLDERS[-1]
        if changes := plan_docker(DAEMON_JSON, dockerd_release(dockerd), folder):
            self.add(changes)
            self.plan_.own |= {change.place.address: change.after for change in changes}
            self.note("Docker takes $GPULOCK_CDI once it was restarted, which ends its containers")
        if not self.settings.cdi_dir:
            self.note("gpulock cdi --write makes the names; gpulockd keeps them, once reloaded")

    def is_hook_wanted(self, program: str, place: FilePlace, folder: Path, asked: bool) -> bool:
        """Return whether a container program's hook is to be there, or offer it where it is not.

        Raises InstallError where the program's own folder is missing.
        """
        if not asked and place.address not in self.plan_.record.load():  # once chosen, it stays
            if folder.is_dir() and place.read() is None:
                self.note(f"{program} gives a container no mask of the job: --{program} sets it")
            return False
        if not folder.is_dir():
            raise InstallError(f"no {folder}: --{program} puts a hook there; install {program}")
        return True

    def count_gpus(self, asked: int | None, needed: bool) -> int:
        """Return how many GPUs this node must have, 0 for one without; raise InstallError."""
        stated = self.settings.expected_gpus
        if asked and stated and asked != stated:
            raise InstallError(
                f"{self.config_path} says EXPECTED_GPUS={stated}, not {asked}; change it"
            )
        try:
            shown = len(devices.read_devices(self.settings.driver_root, self.settings.sys_root))
        except Refusal as refusal:
            if needed and not (asked or stated):
                raise InstallError(f"{refusal.why}; {refusal.do}, or give --gpus") from refusal
            self.note(f"{refusal.why}: no GPU job will start here; {refusal.do}")
            return asked or stated
        count = asked or stated or shown
        if needed and not count:
            raise InstallError("the driver shows no GPU; look at the driver, or give --gpus")
        if count != shown:
            self.note(f"the driver shows {shown} GPUs, not {count}: see gpulock doctor")
        return count
