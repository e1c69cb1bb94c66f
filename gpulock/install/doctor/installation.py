# SPDX-License-Identifier: Apache-2.0
"""For which schedulers gpulock is installed here, and what an installation would change now.

The items of the installers know that themselves: doctor says it, and never says it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import gpulock
from gpulock.install.doctor.check import Finding, fact, fault, warning
from gpulock.install.files import InstallError
from gpulock.install.hooks import HookPaths
from gpulock.install.items import Item, Wanted, run_items
from gpulock.install.versions import (
    CURRENT,
    Hooks,
    current_hooks,
    hooks_folder,
    installed_schedulers,
    list_hook_versions,
    version_in_force,
)
from gpulock.node.settings import Settings

DAEMONS: Final = {"sge": "sge_execd", "slurm": "slurmd"}
HOOKS_AGAIN: Final = "gpulock install hooks"


def find_schedulers(settings: Settings, running: Sequence[str]) -> list[str]:
    """Return for which schedulers it is installed; where each map was lost, those that run."""
    here = version_in_force(hooks_folder(settings))
    return installed_schedulers(settings) or (list(running) if here else [])


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


def check_installation(items_of: Callable[[], Sequence[Item]], again: str) -> Iterator[Finding]:
    """Yield what an installation would refuse, else what it would change and leave to a person."""
    try:
        items = items_of()
        for one in [one for one in items if isinstance(one, Hooks)]:
            yield from check_hooks(one)
        others = [one for one in items if not isinstance(one, Hooks)]
        outcome = run_items(others, Wanted.PRESENT, None, lambda _: None, dry_run=True)
    except InstallError as reason:
        yield fault(str(reason), f"then {again}")
        return
    if outcome.changed:
        what = ", ".join(dict.fromkeys(outcome.changed))
        yield fault(f"not as installed: {what}", f"{again} (--dry-run shows the difference)")
    for left in outcome.remainders:
        yield fault(left.clause, left.do or " ".join(" ".join(left.page).split()) or again)


def check_hooks(hooks: Hooks) -> Iterator[Finding]:
    """Compare the hooks in force with those of this package; raise InstallError."""
    now, wanted = hooks.read(), hooks.goal(Wanted.PRESENT)
    if now == wanted:
        yield fact(f"hooks {gpulock.__version__}")
    elif now in list_hook_versions(hooks.folder):
        what = f"{now} is in force, this package has {wanted}"
        yield warning(what, HOOKS_AGAIN, "hooks")
    else:
        what = f"{hooks.folder}/{CURRENT} is {now or 'not there'}: jobs fail, or drain the node"
        yield fault(what, HOOKS_AGAIN, "hooks")


def check_trial(settings: Settings, trial: Callable[[HookPaths], None]) -> Iterator[Finding]:
    """Start the hooks in force as a test, that of a task as a user."""
    if version_in_force(hooks_folder(settings)) is None:
        return  # the installation says so
    try:
        trial(current_hooks(settings))
    except InstallError as reason:
        yield fault(str(reason), HOOKS_AGAIN)
