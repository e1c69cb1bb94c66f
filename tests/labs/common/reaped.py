# SPDX-License-Identifier: Apache-2.0
"""What a reconcile on a lab's node did, as it told it: `gpulock reap`, whatever the scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[3]
# What `gpulock reap` does, told as JSON: it runs on the node, in whatever namespace it is put.
REAP: Final = """
import json, sys
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.errors import Refusal
from gpulock.node.settings_file import read_settings
node = Node(read_settings(sys.argv[1]))
told = {"refused": "", "restored": [], "outcomes": {}}
for _ in range(20):
    told["refused"], found = "", {}
    try:
        report = reconcile_locks(node, make_liveness_judge(node), Deadline(20))
    except Refusal as refusal:
        told["refused"], blind = f"{refusal.kind}: {refusal.why}", refusal.why
    else:
        told["restored"] += [record.job() for record in report.restored]
        found = {o.lock.id: [o.act, o.verdict.state, o.reason] for o in report.outcomes}
        told["outcomes"].update(found)
        blind = report.blind
    if not blind.startswith("processes came and went faster"):
        break
    # it saw nothing: it has held all but what is free whichever process lives
    gone = [found[name][2] for name in found if found[name][0] == "freed"]
    assert all(why.startswith("claimed before this boot") for why in gone)
print(json.dumps(told))
"""
ENV: Final = {"PYTHONPATH": str(REPOSITORY)}


@dataclass(frozen=True)
class Reaped:
    """What a reconcile on a node said: (act, verdict, reason) by device."""

    refused: str
    restored: list[str]
    outcomes: dict[str, tuple[str, str, str]]

    def acts(self) -> list[tuple[str, str]]:
        """Return (act, verdict) of every lock."""
        return [(act, verdict) for act, verdict, _ in self.outcomes.values()]

    def reasons(self) -> str:
        """Return every reason in one text."""
        return self.refused + "; ".join(reason for _, _, reason in self.outcomes.values())


def command(config: str) -> list[str]:
    """Return the command of a reconcile, to be run with `ENV`."""
    return [sys.executable, "-c", REAP, config]


def reaped(done: subprocess.CompletedProcess[str]) -> Reaped:
    """Return what it told."""
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    outcomes = {name: (act, state, why) for name, (act, state, why) in told["outcomes"].items()}
    return Reaped(told["refused"], told["restored"], outcomes)
