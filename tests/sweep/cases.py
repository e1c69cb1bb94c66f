# SPDX-License-Identifier: Apache-2.0
"""What is stopped, from which state, and what must hold afterwards.

After every fault Grid Engine's own course is taken: a prolog that failed or was killed has its
epilog run, then the shepherd ends, then one reconcile comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulock.boot import state_boot_id
from gpulock.refusal import Refusal
from tests.sweep.stage import Stage
from tests.sweep.trace import KILL, Point

KILLED = 128 + 9
PROLOG_CODES = (0, 1, 99, 100)
REAP_CODES = (0, 1, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """A program to be stopped, on a node where a dead job left `gone` locks.

    `first`: nothing was claimed in this boot yet, so there is no other job either.
    """

    name: str
    hook: str
    gone: int = 0
    first: bool = False

    def prepare(self, stage: Stage) -> None:
        """Bring the node into the state that the program starts from, and save it."""
        if not self.first:
            stage.must(stage.hook(stage.other, "prolog"), 0)
        if self.gone:
            stage.leave_dead_locks(self.gone)
        if self.hook == "reap":
            stage.leave_cut_short()
        if self.hook == "epilog":
            stage.must(stage.hook(stage.mine, "prolog"), 0)
        stage.save()

    def run(self, stage: Stage, head: Sequence[str] = ()) -> int:
        """Run the program behind `head`; return its exit code."""
        return stage.reap(head) if self.hook == "reap" else stage.hook(stage.mine, self.hook, head)

    def codes(self, point: Point) -> tuple[int, ...]:
        """Return the exit codes that are documented."""
        if point.kind == KILL:
            return (KILLED,)
        return {"prolog": PROLOG_CODES, "epilog": (0,), "reap": REAP_CODES}[self.hook]


CASES = (
    Case("prolog", "prolog"),
    Case("prolog, settles", "prolog", gone=5),
    Case("prolog, first of a boot", "prolog", first=True),
    Case("epilog", "epilog"),
    Case("reap", "reap", gone=2),
)


class Check:
    """What must hold after one fault; `wrong` collects what does not."""

    def __init__(self, stage: Stage, case: Case, code: int) -> None:
        self.stage = stage
        self.case = case
        self.code = code
        self.wrong: list[str] = []

    def all(self, point: Point, others: dict[str, bytes], outside: object) -> list[str]:
        """Take Grid Engine's course from here on; return what was wrong."""
        stage = self.stage
        self.expect(self.code in self.case.codes(point), f"it exits {self.code}")
        self.unharmed(others, "the fault")
        self.boot_rule()
        if self.case.hook == "prolog":
            self.after_prolog()
            self.unharmed(others, "the epilog")
        stage.bury(stage.mine)
        try:
            self.settled(others)
        finally:
            stage.raise_again(stage.mine)
        self.expect(stage.outside() == outside, "it touched files that are not its own")
        return self.wrong

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(otherwise)

    def unharmed(self, others: dict[str, bytes], by: str) -> None:
        """Expect the other job's locks as they were."""
        now = self.stage.records(self.stage.other)
        self.expect(now == others, f"{by} changed another job's locks: {sorted(now)}")

    def boot_rule(self) -> None:
        """Expect that STATE_DIR knows the boot before LOCK_DIR: else a loss would go unseen."""
        node = self.stage.node
        if node.store.boot_id() == node.boot_id:
            known = state_boot_id(node.settings.state_dir) == node.boot_id
            self.expect(known, "LOCK_DIR is of this boot and STATE_DIR does not know")

    def after_prolog(self) -> None:
        """Look at what the job was given, then run the epilog."""
        stage = self.stage
        if self.code == 0:
            self.granted()
            stage.reconcile()
            self.granted()
        elif self.code in PROLOG_CODES:
            held = [n for n, lock in stage.locks().items() if lock.owner is None]
            held += stage.locks(stage.mine)
            self.expect(not held, f"it refuses and keeps {held}")
        code = stage.hook(stage.mine, "epilog")
        self.expect(code == 0, f"the epilog exits {code}")
        self.expect(not stage.locks(stage.mine), "the epilog left whole locks of its job")

    def granted(self) -> None:
        """Expect whole locks of two devices, and an environment that names just them."""
        stage = self.stage
        mine = stage.locks(stage.mine)
        records = [lock.owner for lock in mine.values() if lock.owner]
        self.expect(len(mine) == 2, f"a job that starts holds {sorted(mine)}")
        self.expect(len({record.token for record in records}) == 1, "its locks are of two claims")
        self.expect(all(set(r.devices) == set(mine) for r in records), "its locks are not whole")
        indexes = [str(d.index) for d in stage.node.devices() if d.id in mine]
        mask = stage.mask(stage.mine.job)
        self.expect(mask == [",".join(indexes)], f"mask {mask}, but it holds {indexes}")

    def settled(self, others: dict[str, bytes]) -> None:
        """Expect that one reconcile leaves the living owner's locks and nothing else."""
        stage = self.stage
        stage.reconcile()
        self.unharmed(others, "the reconcile")
        left = sorted(set(stage.locks()) - set(others))
        self.expect(not left, f"still locked after a reconcile: {left}")
        rest = len(stage.node.devices()) - len(others)
        try:
            grant = stage.claim_rest(rest)
        except Refusal as refusal:
            self.wrong.append(f"afterwards nothing is granted: {refusal.why}")
            return
        twice = {d.id for d in grant.devices} & set(others)
        self.expect(not twice, f"granted twice: {sorted(twice)}")
        self.unharmed(others, "the next claim")
