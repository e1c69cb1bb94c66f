# SPDX-License-Identifier: Apache-2.0
"""How a container gets the mask of its job: hooks of enroot and podman."""

from __future__ import annotations

from pathlib import Path

from gpulock.install.change import FilePlace
from gpulock.install.hooks import InstallError, find_share_folder, real_interpreter
from gpulock.install.items import PlaceItem

ENROOT_HOOKS = Path("/etc/enroot/hooks.d")
ENROOT_HOOK = "97-gpulock.sh"  # before 98-nvidia.sh, which reads what it writes
PODMAN_HOOKS = Path("/usr/share/containers/oci/hooks.d")  # rootless podman looks nowhere else
PODMAN_HOOK, PODMAN_PROGRAM = "97-gpulock.json", "gpulock_mask.py"


def enroot_hook_text() -> str:
    """Return enroot's hook."""
    return (find_share_folder() / "prolog/enroot" / ENROOT_HOOK).read_text()


def podman_hook_text() -> str:
    """Return the file that names podman's hook."""
    return (find_share_folder() / "prolog/podman" / PODMAN_HOOK).read_text()


def podman_program_text(interpreter: str) -> str:
    """Return podman's hook, run by an interpreter; raise InstallError."""
    source = find_share_folder() / "prolog/podman" / PODMAN_PROGRAM
    return f"#!{real_interpreter(interpreter)} -IS\n{source.read_text().partition(chr(10))[2]}"


def enroot_items() -> list[PlaceItem]:
    """Return enroot's hook as an item."""
    return [PlaceItem(FilePlace(ENROOT_HOOKS / ENROOT_HOOK, 0o755), enroot_hook_text())]


def podman_items(interpreter: str) -> list[PlaceItem]:
    """Return podman's hook as items, the program before the file that names it."""
    text = podman_program_text(interpreter)
    program = PlaceItem(FilePlace(PODMAN_HOOKS / PODMAN_PROGRAM, 0o755), text)
    hook = PlaceItem(FilePlace(PODMAN_HOOKS / PODMAN_HOOK), podman_hook_text(), (program,))
    return [program, hook]


def container_items() -> list[PlaceItem]:
    """Return every hook, for whoever takes them away; raise InstallError."""
    return [*enroot_items(), *podman_items(real_interpreter())]


def choose_container_hooks(name: str, asked: bool, interpreter: str) -> list[PlaceItem]:
    """Return the hook of `enroot` or `podman` where it is asked for or there.

    Raises InstallError where the program's own folder is missing.
    """
    folder, items = {
        "enroot": (ENROOT_HOOKS, enroot_items()),
        "podman": (PODMAN_HOOKS.parents[1], podman_items(interpreter)),
    }[name]
    if asked and not folder.is_dir():
        raise InstallError(f"no {folder}: --{name} puts a hook there; install {name}")
    return items if asked or items[-1].place.read() is not None else []
