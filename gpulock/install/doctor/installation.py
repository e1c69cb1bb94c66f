# SPDX-License-Identifier: Apache-2.0
"""For which schedulers gpulock is installed here, and what an installation would change now.

The items of the installers know that themselves: doctor says it, and never says it again.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import Finding, fact, fault, warning
from gpulock.install.hooks import InstallError
from gpulock.install.installed import find_sge_installation, find_slurm_installation
from gpulock.install.items import FolderItem, Item, ItemRun, PlaceItem, Wanted
from gpulock.install.versions import CURRENT, DEFAULT_PREFIX, InstalledHooks, version_in_force
from gpulock.node.settings import Settings

DAEMONS: Final = {"sge": "sge_execd", "slurm": "slurmd"}
HOOKS_AGAIN: Final = "gpulock install hooks"


def find_schedulers(settings: Settings, prefix: Path, running: Sequence[str]) -> list[str]:
    """Return the schedulers for which gpulock is installed; where each map was lost, by daemons."""
    maps = {"sge": find_sge_installation(settings), "slurm": find_slurm_installation(settings)}
    named = [name for name, here in maps.items() if here]
    return named or (list(running) if version_in_force(prefix) else [])


def installed_python(settings: Settings, scheduler: str) -> str:
    """Return the interpreter for which the hooks of a scheduler were rendered."""
    finders = {"sge": find_sge_installation, "slurm": find_slurm_installation}
    here = finders[scheduler](settings)
    return (here.python if here else "") or sys.executable


def install_command(scheduler: str, prefix: Path, **options: str) -> str:
    """Return the command that installs again what is here; of empty options nothing."""
    given = {"prefix": "" if prefix == DEFAULT_PREFIX else str(prefix), **options}
    words = [f" --{name} {shlex.quote(value)}" for name, value in given.items() if value]
    return f"gpulock install {scheduler}{''.join(words)}"


def check_installed(schedulers: Sequence[str], running: Sequence[str]) -> Iterator[Finding]:
    """Name each scheduler that runs here and starts no hook of gpulock's."""
    daemons = " and ".join(DAEMONS[name] for name in running)
    missing = [name for name in running if name not in schedulers]
    if missing == list(running) and missing:
        do = "; ".join(f"gpulock install {name}" for name in missing)
        yield fault(f"it is installed into no scheduler here ({daemons} runs)", do)
        return
    for name in missing:
        what = f"{DAEMONS[name]} runs here, and it is not installed for that"
        yield warning(f"{what}: its jobs get no lock", f"gpulock install {name}")
    yield fact(os.uname().nodename.partition(".")[0])
    if not schedulers:
        yield fact("no scheduler")


def check_items(items: Sequence[Item], again: str) -> Iterator[Finding]:
    """Yield what an installation would change, and what it would leave to the administrator."""
    hooks = [one for one in items if _installed_hooks(one)]
    others = [one for one in items if one not in hooks and not isinstance(one, FolderItem)]
    for one in hooks:
        yield from check_hooks(one, again)
    outcome = ItemRun(others, Wanted.PRESENT, lambda _: None, dry_run=True).run()
    if outcome.changed:
        what = ", ".join(dict.fromkeys(outcome.changed))
        yield fault(f"not as installed: {what}", f"{again} (--dry-run shows the difference)")
    for left in outcome.remainders:
        yield fault(left.clause, " ".join(" ".join(left.page).split()) or again)


def _installed_hooks(item: Item) -> InstalledHooks | None:
    place = item.place if isinstance(item, PlaceItem) else None
    return place if isinstance(place, InstalledHooks) else None


def check_hooks(item: Item, again: str) -> Iterator[Finding]:
    """Compare the hooks in force with those of this package; raise InstallError."""
    place = _installed_hooks(item)
    assert place is not None
    now, wanted, name = place.read(), place.wanted(), "hooks"
    if now is None or not (place.prefix / now.partition(" ")[0]).is_dir():
        what = f"{place.prefix / CURRENT} leads nowhere: every job fails, or drains the node"
        yield fault(what, again, name)
    elif now.startswith(f"{wanted} "):
        yield fault(f"not as they were installed: {now}", HOOKS_AGAIN, name)
    elif now != wanted:
        yield warning(f"{now} is in force, this package has {wanted}", HOOKS_AGAIN, name)
    else:
        yield fact(f"hooks {now.rpartition('-')[0]}")


def check_trial(prefix: Path, trial: Callable[[], None], again: str) -> Iterator[Finding]:
    """Start the hooks in force as a test."""
    if version_in_force(prefix) is None:
        return  # the installation says so
    try:
        trial()
    except InstallError as reason:
        yield fault(str(reason), again)
