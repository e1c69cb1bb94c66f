# SPDX-License-Identifier: Apache-2.0
"""Installed hooks: one folder a version below a prefix, and a link to the one in force.

A version is rendered, tried as execd would start it, and on disk, and only then is the link
swapped: at every instant, and after a power cut at any, `current` leads to a whole set of hooks.
Versions that are not in force go with the next install, once no lock is held; the one before is
kept, for hooks that run at that moment.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import gpulock
from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.errors import Refusal
from gpulock.install.change import Place
from gpulock.install.hooks import (
    HookPaths,
    InstallError,
    describe_drop_env,
    hook_folder_files,
    hooks_digest,
    make_public_folder,
    probe_interpreter,
    real_interpreter,
    remove_file_durably,
    render_hooks,
)
from gpulock.install.trial import self_test_sge_hooks
from gpulock.store import atomic
from gpulock.store.locks import LockStore

DEFAULT_PREFIX: Final = Path("/usr/local/libexec/gpulock")
CURRENT: Final = "current"
_NAME: Final = re.compile(r"[0-9][^/-]*-[0-9a-f]{12}")  # of a version's folder


@dataclass(frozen=True)
class InstalledHooks(Place):
    """The hooks in force on this node: a place whose value is the version's name.

    `trial` is started before the swap, after the trial of all hooks.
    """

    prefix: Path
    config: Path
    interpreter: str
    lock_dir: Path = Path("/run/gpulock")
    trial: Callable[[HookPaths], None] | None = field(default=None, compare=False)
    named = f"hooks {{prefix}}/{CURRENT}"

    def wanted(self) -> str:
        """Return the name of the version that this package would install."""
        real = real_interpreter(self.interpreter)
        return f"{gpulock.__version__}-{hooks_digest(self.config, real, probe_interpreter(real))}"

    def read(self) -> str | None:
        """Return the version in force, marked where its files are not what was installed."""
        name = version_in_force(self.prefix)
        if name is None or name != self.wanted():
            return name
        folder = self.prefix / name
        files = hook_folder_files(folder, self.config, real_interpreter(self.interpreter))
        for file, data in files.items():
            try:
                same = (folder / file).read_bytes() == data
            except OSError:
                same = False
            if not same:
                return f"{name} (damaged: {file})"
        return name

    def discard_leftovers(self) -> None:
        if version_in_force(self.prefix) is None:
            self.write(None)

    def check_safe(self, before: str | None) -> None:
        """Raise InstallError where users could write, or Grid Engine would lose what it starts."""
        if os.geteuid() == 0 and (why := why_untrusted_program(self.prefix, (0,))):
            raise InstallError(f"{why}: hooks run as root; make it writable by root alone")
        if before and HookPaths(self.prefix / before).drop_env.exists():
            describe_drop_env()

    def write(self, value: str | None) -> None:
        try:
            discard_cut_switch(self.prefix)
            if value is None:
                remove_file_durably(self.prefix / CURRENT)
                for name in list_hook_versions(self.prefix):
                    shutil.rmtree(self.prefix / name)
                if self.prefix.is_dir() and not any(self.prefix.iterdir()):
                    self.prefix.rmdir()
                return
            before = version_in_force(self.prefix)
            make_public_folder(self.prefix)
            self.check_safe(before)
            if value == self.wanted():
                paths = render_hooks(self.prefix / value, self.config, self.interpreter)
            else:
                paths = HookPaths(self.prefix / value)
            try:
                self_test_sge_hooks(paths)
                if self.trial:
                    self.trial(paths)
            except InstallError as fault:
                raise InstallError(f"{fault}; nothing was put in force") from fault
            for path in (self.prefix / value, *(self.prefix / value).rglob("*")):
                atomic.fsync_path(f"{path}/." if path.is_dir() else str(path))
            switch_hook_version(self.prefix, value)
            if not list_locked_devices(self.lock_dir):
                for name in {*list_hook_versions(self.prefix)} - {value, before}:
                    shutil.rmtree(self.prefix / name)
        except OSError as fault:
            raise InstallError(f"{self.prefix}: {fault}; are you root?") from fault


def version_in_force(prefix: Path) -> str | None:
    """Return the version that the link names; raise InstallError where it is no link."""
    try:
        return os.path.basename(os.readlink(prefix / CURRENT))
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise InstallError(f"{prefix / CURRENT}: {fault.strerror}; remove it") from fault


def list_hook_versions(prefix: Path) -> list[str]:
    """Return the names of the version folders, also of one that was killed while it was made."""
    try:
        entries = [one for one in sorted(prefix.iterdir()) if one.is_dir()]
    except OSError:
        return []
    ours = [one for one in entries if (one / "lib").is_dir() or _NAME.fullmatch(one.name)]
    return [one.name for one in ours if not one.is_symlink()]


def discard_cut_switch(prefix: Path) -> None:
    """Remove the link of a switch that was killed; raise OSError."""
    for link in prefix.glob(f".{CURRENT}.*"):
        link.unlink()


def switch_hook_version(prefix: Path, name: str) -> None:
    """Put a version in force at one stroke, durably."""
    beside = prefix / f".{CURRENT}.{os.urandom(6).hex()}"
    beside.symlink_to(name)
    beside.rename(prefix / CURRENT)
    atomic.fsync_path(f"{prefix}/.")


def list_held_devices(lock_dir: Path, scheduler: str) -> list[str]:
    """Return the devices that a scheduler's jobs hold, or of which the holder cannot be told."""
    store = LockStore(str(lock_dir))
    return [
        name
        for name in list_locked_devices(lock_dir)
        if (owner := store.read(name).owner) is None or owner.scheduler == scheduler
    ]


def list_locked_devices(lock_dir: Path) -> list[str]:
    """Return the devices that are held; raise InstallError where that cannot be seen."""
    try:
        return [*LockStore(str(lock_dir)).read_all_locks()]
    except Refusal as fault:
        raise InstallError(f"{fault.why}; are you root?") from fault
