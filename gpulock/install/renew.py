# SPDX-License-Identifier: Apache-2.0
"""Render the installed hooks again, as after an upgrade of gpulock or of its Python.

The schedulers name a link, so none of them is asked. Only hooks that this gpulock's Python
installed are rendered: those of another environment are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulock.install import container_hooks
from gpulock.install.hooks import describe_drop_env
from gpulock.install.installed import find_sge_installation, find_slurm_installation
from gpulock.install.items import ItemRun, PlaceItem, Wanted, run_items
from gpulock.install.trial import try_slurm_hooks
from gpulock.install.versions import InstalledHooks
from gpulock.node.settings import Settings


def renew_hooks(settings: Settings, python: str, echo: Callable[[str], None]) -> None:
    """Render the installed hooks for `python` again, and say what was changed.

    Raises InstallError.
    """
    sge, slurm = find_sge_installation(settings), find_slurm_installation(settings)
    others: list[str] = []
    for name, here, trial in (("sge", sge, None), ("slurm", slurm, try_slurm_hooks)):
        if here is None:
            continue
        if here.python not in ("", python):
            others.append(f"gpulock install {name}")
            continue
        if name == "sge" and slurm and slurm.prefix == here.prefix:
            continue  # one folder, which is tried for both below
        config, lock_dir = Path(settings.path), Path(settings.lock_dir)
        hooks = InstalledHooks(here.prefix, config, python, lock_dir, trial)
        if hooks.read() not in (None, wanted := hooks.wanted()):
            if name == "sge" or sge:
                echo(describe_drop_env())
            items, records = [PlaceItem(hooks, wanted)], Path(settings.state_dir, "install")
            run_items(items, Wanted.PRESENT, records, echo)
    renew_podman_hook(python, echo)
    if others:
        echo(f"the hooks are another Python's: {', '.join(sorted(others))} makes them {python}'s")


def renew_podman_hook(python: str, echo: Callable[[str], None]) -> None:
    """Have podman's hook, where it is, started by `python`."""
    if (container_hooks.PODMAN_HOOKS / container_hooks.PODMAN_PROGRAM).exists():
        items = container_hooks.podman_items(python)[:1]
        ItemRun(items, Wanted.PRESENT, echo, dry_run=False).run()
