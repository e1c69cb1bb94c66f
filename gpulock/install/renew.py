# SPDX-License-Identifier: Apache-2.0
"""Render the installed hooks again, as when an upgrade of the distribution took their Python.

The schedulers name a link, so none of them is asked. Only hooks that this gpulock's Python
installed are rendered: those of another environment are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulock.install.change import (
    Change,
    FilePlace,
    InstallRecord,
    Place,
    apply_changes,
    install_record,
)
from gpulock.install.hooks import describe_drop_env, real_interpreter
from gpulock.install.planner import PODMAN_HOOKS, PODMAN_PROGRAM
from gpulock.install.trial import try_slurm_hooks
from gpulock.install.versions import CURRENT, InstalledHooks
from gpulock.node.settings import Settings

SCHEDULERS: Final = ("sge", "slurm")


def renew_hooks(
    settings: Settings, python: str, if_broken: bool, echo: Callable[[str], None]
) -> None:
    """Render the installed hooks for `python` again, and say what was changed.

    With `if_broken` only where the interpreter that a hook names is gone. Raises InstallError.
    """
    others: set[str] = set()
    for scheduler in SCHEDULERS:
        record = install_record(settings, scheduler)
        trial = try_slurm_hooks if scheduler == "slurm" else None
        for address, value in record.load().items():
            path = Path(address[1])
            if address[0] == InstalledHooks.kind and address[3] != python:
                others.add(f"gpulock install {scheduler}")
            elif address[0] == InstalledHooks.kind:
                lock_dir = Path(settings.lock_dir)
                hooks = InstalledHooks(path, Path(address[2]), python, lock_dir, trial)
                keep = if_broken and has_interpreter(path / CURRENT / "prolog/slurm")
                now, wanted = hooks.read(), hooks.wanted()
                if scheduler == "sge" and now not in (None, wanted) and not keep:
                    echo(describe_drop_env())
                if now is not None:
                    renew_place(record, hooks, wanted, keep, echo)
            elif path == PODMAN_HOOKS / PODMAN_PROGRAM and value is not None:
                text = f"#!{real_interpreter(python)} -IS\n" + value.partition("\n")[2]
                keep = if_broken and has_interpreter(path)
                program = FilePlace(path, 0o755)
                if program.read() in (value, text):
                    renew_place(record, program, text, keep, echo)
    if others and not if_broken:
        echo(f"the hooks are another Python's: {', '.join(sorted(others))} makes them {python}'s")


def renew_place(
    record: InstallRecord, place: Place, value: str, keep: bool, echo: Callable[[str], None]
) -> None:
    """Give a place its new value, unless it is kept as it is, and note that.

    What the renewal for another scheduler has made is noted for this one as well.
    """
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
