# SPDX-License-Identifier: Apache-2.0
"""One finding of `gpulock doctor`, and how a look that fails becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.hooks import InstallError

OK, WARNING, FAULT = "ok", "warning", "fault"
BROKEN: Final = 3  # exit code: this node is broken


@dataclass(frozen=True)
class Check:
    """A thing looked at (empty: the one of the look), its state, what was found, what to do."""

    name: str
    state: str
    what: str
    do: str = ""


def ok(what: str, name: str = "") -> Check:
    """Return that a thing is well."""
    return Check(name, OK, what)


def warning(what: str, do: str = "", name: str = "") -> Check:
    """Return what a person should look at."""
    return Check(name, WARNING, what, do)


def fault(what: str, do: str, name: str = "") -> Check:
    """Return what keeps jobs from their GPUs, or lets them share."""
    return Check(name, FAULT, what, do)


def run_checks(name: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return what a look finds; where it fails, what it found so far and the reason."""
    found: list[Check] = []
    try:
        for check in look():
            found.append(check)  # one by one: what was found before a failure counts
    except Refusal as refusal:
        found.append(warning(f"could not be checked: {refusal.why}", refusal.do))
    except (InstallError, OSError, ValueError, KeyError) as reason:
        found.append(warning(f"could not be checked: {reason}"))
    return [replace(check, name=check.name or name) for check in found]


def run_all(looks: Mapping[str, Callable[[], Iterable[Check]]]) -> list[Check]:
    """Return what several looks find, by their names."""
    return [check for name, look in looks.items() for check in run_checks(name, look)]
