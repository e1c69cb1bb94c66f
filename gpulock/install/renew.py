# SPDX-License-Identifier: Apache-2.0
"""Render the installed hooks again, as when an upgrade of the distribution took their Python.

The schedulers name a link, so none of them is asked. Only hooks that this gpulock's Python
installed are rendered: those of another environment are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulock.install import container_hooks
from gpulock.install.change import (
    Change,
    InstallRecord,
    Place,
    apply_changes,
    install_record,
)
from gpulock.install.hooks import describe_drop_env
from gpulock.install.installed import find_slurm_installation
from gpulock.install.items import ItemRun, PlaceItem, Wanted, run_items
from gpulock.install.trial import try_slurm_hooks
from gpulock.install.versions import CURRENT, InstalledHooks
from gpulock.node.settings import Settings


def renew_hooks(
    settings: Settings, python: str, if_broken: bool, echo: Callable[[str], None]
) -> None:
    """Render the installed hooks for `python` again, and say what was changed.

    With `if_broken` only where the interpreter that a hook names is gone. Raises InstallError.
    """
    record = install_record(settings, "sge")
    others: list[str] = []
    for address in record.load():
        if address[0] == InstalledHooks.kind and address[3] != python:
            others.append("gpulock install sge")
        elif address[0] == InstalledHooks.kind:
            path = Path(address[1])
            hooks = InstalledHooks(path, Path(address[2]), python, Path(settings.lock_dir))
            keep = if_broken and has_interpreter(path / CURRENT / "prolog/sge")
            now, wanted = hooks.read(), hooks.wanted()
            if now not in (None, wanted) and not keep:
                echo(describe_drop_env())
            if now is not None:
                renew_place(record, hooks, wanted, keep, echo)
    others += renew_slurm_hooks(settings, python, if_broken, echo)
    renew_podman_hook(python, if_broken, echo)
    if others and not if_broken:
        echo(f"the hooks are another Python's: {', '.join(sorted(others))} makes them {python}'s")


def renew_slurm_hooks(
    settings: Settings, python: str, if_broken: bool, echo: Callable[[str], None]
) -> list[str]:
    """Render Slurm's hooks again; return the command that does it, where another Python's is."""
    here = find_slurm_installation(settings)
    if here is None:
        return []
    if here.python not in ("", python):
        return ["gpulock install slurm"]
    lock_dir = Path(settings.lock_dir)
    hooks = InstalledHooks(here.prefix, Path(settings.path), python, lock_dir, try_slurm_hooks)
    keep = if_broken and has_interpreter(here.prefix / CURRENT / "prolog/slurm")
    if hooks.read() is not None and not keep:
        item = PlaceItem(hooks, hooks.wanted())
        run_items([item], Wanted.PRESENT, Path(settings.state_dir, "install"), echo)
    return []


def renew_podman_hook(python: str, if_broken: bool, echo: Callable[[str], None]) -> None:
    """Have podman's hook, where it is, started by `python`."""
    program = container_hooks.PODMAN_HOOKS / container_hooks.PODMAN_PROGRAM
    if program.exists() and not (if_broken and has_interpreter(program)):
        items = container_hooks.podman_items(python)[:1]
        ItemRun(items, Wanted.PRESENT, echo, dry_run=False).run()


def renew_place(
    record: InstallRecord, place: Place, value: str, keep: bool, echo: Callable[[str], None]
) -> None:
    """Give a place its new value, unless it is kept as it is, and note that."""
    now = place.read()
    if now != value and not keep:
        apply_changes([Change(place, now, value)], record, echo)
    elif now == value:
        record.note({place.address: value})


def has_interpreter(hook: Path) -> bool:
    """Return whether the interpreter is there that a hook names; true where there is no hook."""
    try:
        with hook.open() as file:
            line = file.readline()
    except OSError:
        return True
    return Path(line.removeprefix("#!").partition(" ")[0].strip()).is_file()
