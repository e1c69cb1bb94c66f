# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at on the installed hooks: their version, their interpreter, a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import Check, fault, ok, warning
from gpulock.install.hooks import HookPaths, InstallError
from gpulock.install.versions import CURRENT, InstalledHooks, version_in_force
from gpulock.node.settings import Settings

_PRIVATE: Final = ("/root/", "/home/")


@dataclass(frozen=True)
class InstalledHookChecks:
    """The hooks of one scheduler below a prefix; `costs` is what becomes of jobs without them."""

    scheduler: str
    prolog: Callable[[HookPaths], Path]
    costs: str
    trial: Callable[[HookPaths, str], None]  # with the interpreter; raises InstallError
    tried: str

    def check(self, settings: Settings, config: Path, prefix: Path) -> Iterator[Check]:
        """Look at the installed hooks, their interpreter, and start them as a test."""
        again = f"run gpulock install {self.scheduler} again"
        current = version_in_force(prefix)
        if current is None:
            yield fault(f"none below {prefix}: {self.costs}", f"gpulock install {self.scheduler}")
            return
        paths = HookPaths(prefix / current)
        prolog = self.prolog(paths)
        if not prolog.is_file():
            here = f"{prolog.parent.name}/{prolog.name}"
            what = f"{prefix / CURRENT} leads nowhere (no {here}): {self.costs}"
            yield fault(what, again)
            return
        interpreter = prolog.read_text().partition(" -IS\n")[0].removeprefix("#!")
        if not Path(interpreter).is_file():
            yield fault(f"their interpreter {interpreter} is gone: every job fails", again)
            return
        found = [*check_version(settings, config, prefix, interpreter, again)]
        try:
            self.trial(paths, interpreter)
        except InstallError as reason:
            found.append(fault(str(reason), again))
        yield from found or [ok(f"{prefix / CURRENT} -> {current}, {self.tried}")]


def check_version(
    settings: Settings, config: Path, prefix: Path, interpreter: str, again: str
) -> Iterator[Check]:
    """Yield what is odd about the version in force."""
    if interpreter.startswith(_PRIVATE):
        yield warning(f"{interpreter} is below a home directory", "install with another python")
    place = InstalledHooks(prefix, config, interpreter, Path(settings.lock_dir))
    found, wanted = place.read(), place.wanted()
    if found != wanted and found is not None and found.startswith(f"{wanted} "):
        yield fault(f"not as they were installed: {found}", again)
    elif found != wanted:
        what = f"version {found} is in force, this package is {wanted}"
        yield warning(what, "run gpulock install hooks")
