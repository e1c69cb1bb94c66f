# SPDX-License-Identifier: Apache-2.0
"""What disturbs a measurement on a busy machine: it is undone, tried again, counted and told.

A hook keeps a lock where it could not look at every process in time: right on a node, and no
measurement.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.store.locks import GRANT

TRIES = 10
Result = TypeVar("Result")
TOLD: Counter[str] = Counter()  # what disturbed this run so far, and how often


def undisturbed(act: Callable[[], Result], undo: Callable[[], None], tries: int = TRIES) -> Result:
    """Return what `act` returns; where it raises RuntimeError undo it, count that, and try again.

    Raises RuntimeError, with what else runs here, when it failed so many times.
    """
    said = ""
    for _ in range(tries):
        try:
            return act()
        except RuntimeError as fault:
            said = str(fault)
            TOLD[said] += 1
            undo()
    raise RuntimeError(f"{said}, {tries} times running; {busy()}")


def busy() -> str:
    """Say how busy this machine is."""
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"{load}, {len(Proc().pids())} processes"


def take_locks_away(node: Node) -> None:
    """Leave neither a lock nor a released one on a node, nor what tells that a lock was made."""
    for name in Path(node.store.path).glob(f"{GRANT}*"):
        name.unlink()
    for folder in map(Path, (node.store.locks_dir, node.store.released_dir)):
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path)


def print_disturbances() -> None:
    """Print what was measured again, and why."""
    for said, count in TOLD.most_common():
        print(f"disturbed, and measured again {count} x: {said}")
    if TOLD:
        print(f"  {busy()}: an idle machine measures better")
