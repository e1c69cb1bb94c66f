# SPDX-License-Identifier: Apache-2.0
"""A node that comes up after a power cut: what must hold of claims, notes and history."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections import Counter
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.daemon.history.files import FOLDER, iter_history_lines, list_months
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.daemon.reconcile.temporaries import TemporaryRemover
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import grants
from gpulock.store.locks import Lock
from gpulock.store.quarantine import FOLDER as QUARANTINE_FOLDER
from tests.support.power_log import materialize
from tests.support.power_model import Remainder
from tests.support.trees import Box, bus, judge_of, judging, record, soon

BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n")
LATER = 3600.0  # seconds after the cut until the node comes up
OWNER = 900  # the process that claims after the boot


def read_tokens(state: Path) -> Counter[str]:
    """Return how many lines each claim has, as a reader of the history finds them."""
    found: Counter[str] = Counter()
    for name in list_months(str(state / FOLDER)):
        with open(f"{state}/{FOLDER}/{name}", "rb") as file:
            for line in iter_history_lines(file):
                try:
                    found[json.loads(line)["token"]] += 1
                except ValueError:
                    continue
    return found


class Promises:
    """What must hold after what was told: words of the test, some with a GPU's index or a token.

    "noting N", "out N", "lifting N", "back N": a quarantine is begun, acknowledged, its end is
    begun, acknowledged. "kept TOKEN": the line of a claim must be there in the end.
    """

    def __init__(self, told: frozenset[str]) -> None:
        words = [line.split() for line in told]

        def those(*verbs: str) -> set[str]:
            return {what for verb, what in words if verb in verbs}

        out = those("out") - those("lifting")
        self.out = {int(what) for what in out}
        self.maybe_out = {int(what) for what in those("noting", "lifting") - out - those("back")}
        self.lines = those("kept")


class PoweredNode:
    """A Box that loses its power and comes up again; LOCK_DIR is empty then, or `kept`."""

    def __init__(self, box: Box, *, kept: bool = False) -> None:
        self.box = box
        self.kept = kept
        self.spool = box.root / "spool"
        self.spool.mkdir(exist_ok=True)
        box.proc.execd(box.root)
        self.told: list[str] = []
        self.made: set[str] = set()  # tokens of all claims before the cut
        if kept:
            box.lock.mkdir()
            box.records.mkdir()

    def roots(self) -> list[Path]:
        """Return the folders that are on a disk."""
        on_disk = [self.box.state, self.spool]
        return [*on_disk, self.box.lock, self.box.records] if self.kept else on_disk

    def restart(self, left: Remainder) -> None:
        """Lose the power, and boot with what is left."""
        for root in (self.box.state, self.spool, self.box.lock, self.box.records):
            if root.exists():
                shutil.rmtree(root)
        for root in self.roots():
            root.mkdir()
        materialize(left.tree)
        pending = self.box.state / grants.OWED
        ago = time.time() - LATER
        if pending.is_dir():
            for name in os.listdir(pending):
                os.utime(pending / name, (ago, ago))
        self.boot()

    def boot(self) -> None:
        """Boot: no process of before is left."""
        self.box.proc.boot(str(uuid.uuid4()))
        self.box.proc.add(OWNER, "python", uids=(1000,) * 4)
        self.told = []
        self.history = HistoryWriter(self.told.append)

    def node(self) -> Node:
        """Return the node as a program sees it that starts now."""
        return Node(Settings(dict(self.box.settings)))

    def reconcile(self) -> ReconcileReport:
        """Let gpulockd make a round."""
        node = self.node()
        report = reconcile_locks(node, judge_of(node), soon())
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.history.run(node, report, now)
        TemporaryRemover().run(node, report, now)
        return report

    def claim(self, count: int, pid: int = OWNER) -> Grant:
        """Claim for a process that runs."""
        node = self.node()
        template = record(
            scheduler="process",
            job_id=str(pid),
            pid=pid,
            boot_id=node.boot_id,
            node=node.name,
            add_grp_id=0,
            sid=pid,
        )
        grant = claim_devices(node, template, ClaimRequest(count), judging(node), soon())
        self.made.add(grant.owner.token)
        return grant

    def check(self, left: Remainder) -> None:
        """Check a remainder, with the first claim before the first round and after it.

        What the program told before the cut decides what must hold: see `Promises`.
        """
        for claims_first in (True, False):
            before = set(self.made)
            self.restart(left)
            self.check_boot(Promises(left.told), claims_first)
            self.made = before

    def check_boot(self, promised: Promises, claims_first: bool) -> None:
        """Let claims and rounds go on, and check what is granted and what the history has."""
        known = self.box.state / "boot_id"
        assert not known.exists() or BOOT_ID.fullmatch(known.read_text()), "no boot's id"
        gpus = set(range(len(os.listdir(self.box.driver / "gpus"))))
        if not claims_first:
            self.reconcile()
        noted = self.box.state / QUARANTINE_FOLDER
        names = os.listdir(noted) if noted.is_dir() else []
        free = gpus - promised.out - {n for n in promised.maybe_out if bus(n) in names}
        grant = self.claim(len(free))
        assert {device.id for device in grant.devices} == {bus(n) for n in free}
        for _ in range(2):
            report = self.reconcile()
            assert not report.fault
            assert not report.restored, "a claim of an earlier boot is taken for a living one"
        holders = {lock.owner.token if lock.owner else lock.fault for lock in self.locks()}
        assert holders == {grant.owner.token}
        found = read_tokens(self.box.state)
        assert max(found.values(), default=1) == 1, f"twice in the history: {found}"
        assert promised.lines <= found.keys(), f"lost: {promised.lines - found.keys()}"
        assert found.keys() <= self.made, f"never made: {found.keys() - self.made}"
        assert not self.told, self.told
        place = self.box.state / grants.OWED
        assert not place.is_dir() or os.listdir(place) == [], "of an earlier boot"

    def locks(self) -> list[Lock]:
        """Return the locks that stand."""
        return list(self.node().store.read_all_locks().values())
