# SPDX-License-Identifier: Apache-2.0
"""How a container gets the mask of its job: hooks of enroot and podman."""

from __future__ import annotations

from pathlib import Path

from gpulock.install.files import InstallError, find_share_folder
from gpulock.install.hooks import hooks_python
from gpulock.install.items import FileItem, Item
from gpulock.install.versions import Hooks, installed_schedulers
from gpulock.node.settings import Settings

ENROOT_HOOKS = Path("/etc/enroot/hooks.d")
ENROOT_HOOK = "97-gpulock.sh"  # before 98-nvidia.sh, which reads what it writes
PODMAN_HOOKS = Path("/usr/share/containers/oci/hooks.d")  # rootless podman looks nowhere else
PODMAN_HOOK, PODMAN_PROGRAM = "97-gpulock.json", "gpulock_mask.py"


def enroot_items() -> list[FileItem]:
    """Return enroot's hook as an item."""
    text = (find_share_folder() / "prolog/enroot" / ENROOT_HOOK).read_text()
    return [FileItem(ENROOT_HOOKS / ENROOT_HOOK, text, 0o755)]


def podman_items() -> list[FileItem]:
    """Return podman's hook as items, the program before the file that names it."""
    share = find_share_folder() / "prolog/podman"
    _, _, code = (share / PODMAN_PROGRAM).read_text().partition("\n")
    program = FileItem(PODMAN_HOOKS / PODMAN_PROGRAM, f"#!{hooks_python()} -IS\n{code}", 0o755)
    named = (share / PODMAN_HOOK).read_text()
    return [program, FileItem(PODMAN_HOOKS / PODMAN_HOOK, named)]


def container_items() -> list[FileItem]:
    """Return every hook, for whoever takes them away."""
    return [*enroot_items(), *podman_items()]


def choose_container_hooks(enroot: bool, podman: bool) -> list[FileItem]:
    """Return the hooks that are asked for or there.

    Raises InstallError where the program's own folder is missing.
    """
    chosen: list[FileItem] = []
    for name, asked, folder, items in (
        ("enroot", enroot, ENROOT_HOOKS, enroot_items()),
        ("podman", podman, PODMAN_HOOKS.parents[1], podman_items()),
    ):
        if asked and not folder.is_dir():
            raise InstallError(f"no {folder}: --{name} puts a hook there; install {name}")
        chosen += items if asked or items[-1].read() is not None else []
    return chosen


def installed_hook_items(settings: Settings) -> list[Item]:
    """Return the hooks that are here, as an upgrade of gpulock or of its Python renders them."""
    hooks = [Hooks(settings)] if installed_schedulers(settings) else []
    return [*hooks, *(item for item in container_items() if item.read() is not None)]
