# SPDX-License-Identifier: Apache-2.0
"""Installed hooks: one folder a version in one place, and a link to the one in force.

A new version is rendered, tried as its scheduler would start it, and on disk, and only then is the
link swapped: at every instant, and after a power cut at any, `current` leads to a whole set of
hooks. A damaged one is made anew beside. The version before is kept: hooks that run at that moment
load the rest of their modules from it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.errors import Refusal
from gpulock.install import drop_env
from gpulock.install.files import InstallError, make_public_folder
from gpulock.install.hooks import (
    HookPaths,
    hook_folder_files,
    hooks_version,
    render_hooks,
)
from gpulock.install.items import ByHand, Item, Remainder, Wanted
from gpulock.install.trial import try_sge_hooks, try_slurm_hooks
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH
from gpulock.sge import card_map
from gpulock.slurm import gres_map
from gpulock.store import atomic
from gpulock.store.locks import LockStore

FOLDER: Final = Path("/usr/lib/gpulock/hooks")
CURRENT: Final = "current"
AGAIN: Final = ".again"  # ends the name of every other folder of a version that was damaged
PLUGIN: Final = "spank_gpulock.so"  # of SPANK, which an administrator makes
SGE, SLURM = "sge", "slurm"
_MAPS: Final = {SGE: card_map.MAP_NAME, SLURM: gres_map.MAP_NAME}
_TRIALS: Final = {SGE: try_sge_hooks, SLURM: try_slurm_hooks}
_JOBS: Final = {SGE: "Grid Engine's", SLURM: "Slurm's"}
NOT_IN_FORCE: Final = "no version"  # of a run that was killed
WAIT_OR_REAP: Final = "gpulock reap frees what dead jobs have left; wait for the others"


def hooks_folder(settings: Settings) -> Path:
    """Return where the hooks are: of a node with settings of its own below its STATE_DIR."""
    return FOLDER if settings.path == DEFAULT_PATH else Path(settings.state_dir, "hooks")


def current_hooks(settings: Settings) -> HookPaths:
    """Return the hooks that are in force."""
    return HookPaths(hooks_folder(settings) / CURRENT)


def installed_schedulers(settings: Settings) -> list[str]:
    """Return for which schedulers gpulock is installed here.

    A map of each tells: of Grid Engine's ids, of Slurm's positions. It comes before the hooks, and
    goes last.
    """
    return [name for name, file in _MAPS.items() if Path(settings.state_dir, file).exists()]


def is_to_uninstall(settings: Settings, scheduler: str) -> bool:
    """Say whether it is installed for a scheduler, or hooks are here whose maps were lost."""
    here = installed_schedulers(settings)
    return scheduler in here or (not here and version_in_force(hooks_folder(settings)) is not None)


class Hooks(Item):
    """The hooks in force on this node, for a scheduler and those for which they are here.

    `before_removal` waits until no scheduler's daemon starts them; it raises InstallError.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: str = "",
        before_removal: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings, self.scheduler, self.before_removal = settings, scheduler, before_removal
        self.folder, self.config = hooks_folder(settings), Path(settings.path)
        self.title = f"hooks {self.folder}/{CURRENT}"

    def read(self) -> str | None:
        """Return the version in force, marked where its folder is gone.

        It is marked as damaged where a file of this package's own version is not as installed.
        """
        name, own = version_in_force(self.folder), hooks_version(self.config)
        if name is None and self.folder.is_dir():
            return NOT_IN_FORCE
        if name is not None and not (self.folder / name).is_dir():
            return f"{name} (its folder is gone)"
        if name is None or name.removesuffix(AGAIN) != own:
            return name
        for file, data in hook_folder_files(self.folder / name, self.config).items():
            path = self.folder / name / file
            if not path.is_file() or path.read_bytes() != data:
                return f"{name} (damaged: {file})"
        return own

    def goal(self, wanted: Wanted) -> str | None:
        return hooks_version(self.config) if wanted is Wanted.PRESENT else None

    def write(self, wanted: Wanted) -> None:
        try:
            if wanted is Wanted.PRESENT:
                self._put_in_force()
                return
            self.before_removal()
            shutil.rmtree(self.folder)
        except OSError as fault:
            raise InstallError(f"{self.folder}: {fault}; are you root?") from fault

    def _put_in_force(self) -> None:
        """Render the version of this package, try it, and switch to it; raise InstallError."""
        schedulers = {self.scheduler, *installed_schedulers(self.settings)} - {""}
        if SGE in schedulers:
            drop_env.drop_env_program()  # without a compiler it raises, before anything is changed
        name, before = hooks_version(self.config), version_in_force(self.folder)
        name += AGAIN if name == before else ""
        make_public_folder(self.folder)
        if os.geteuid() == 0 and (why := why_untrusted_program(self.folder, (0,))):
            raise InstallError(f"{why}: hooks run as root; make it writable by root alone")
        paths = render_hooks(self.folder / name, self.config)
        try:
            for scheduler in schedulers:
                _TRIALS[scheduler](paths)
        except InstallError as fault:
            raise InstallError(f"{fault}; nothing was put in force") from fault
        for path in (paths.folder, *paths.folder.rglob("*")):
            atomic.fsync_path(f"{path}/." if path.is_dir() else str(path))
        switch_hook_version(self.folder, name)
        for old in {*list_hook_versions(self.folder)} - {name, before}:
            shutil.rmtree(self.folder / old)


def held_devices_item(settings: Settings, scheduler: str) -> ByHand:
    """Return the devices that a scheduler's jobs hold, or may: what these need stays."""

    def ask() -> Remainder | None:
        try:
            locks = LockStore(settings.lock_dir).read_all_locks().items()
        except Refusal as fault:
            raise InstallError(f"{fault.why}; are you root?") from fault
        held = [n for n, one in locks if one.owner is None or one.owner.scheduler == scheduler]
        what = f"{_JOBS[scheduler]} jobs hold {len(held)} devices ({' '.join(held)})"
        return Remainder(f"{what}: {WAIT_OR_REAP}, or gpulock release each") if held else None

    return ByHand("jobs that hold devices", ask)


def version_in_force(folder: Path) -> str | None:
    """Return the version that the link names; raise InstallError where it is no link."""
    try:
        return os.path.basename(os.readlink(folder / CURRENT))
    except FileNotFoundError:
        return None
    except OSError as fault:
        why = "it is no link; remove it" if fault.errno == errno.EINVAL else fault.strerror
        raise InstallError(f"{folder / CURRENT}: {why}") from fault


def list_hook_versions(folder: Path) -> list[str]:
    """Return the names of the version folders, also of one that was killed while it was made."""
    return sorted(one.name for one in folder.glob("*") if one.is_dir() and not one.is_symlink())


def switch_hook_version(folder: Path, name: str) -> None:
    """Put a version in force at one stroke, durably; raise OSError."""
    beside = folder / f".{CURRENT}.{os.urandom(6).hex()}"
    beside.symlink_to(name)
    beside.rename(folder / CURRENT)
    atomic.fsync_path(f"{folder}/.")
