# SPDX-License-Identifier: Apache-2.0
"""A case of the sweep: a program on a stage, and what must hold whatever is done to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpulock.errors import Refusal
from gpulock.node.devices import SHARE
from gpulock.store import atomic
from gpulock.store.locks import Lock, list_names
from tests.sweep.stage import MINE, Stage
from tests.sweep.trace import KILL, Point

KILLED = 128 + 9
REAP_CODES = (0, 1, 3)


class Play(ABC):
    """One program, on a node in the state that it starts from.

    `living` are jobs whose locks nothing may touch. After each fault the scheduler takes its own
    course, then one reconcile comes by.
    """

    codes: tuple[int, ...] = (0,)  # the exit codes that are documented

    def __init__(self, stage: Stage, living: Sequence[int]) -> None:
        self.stage = stage
        self.marker = str(stage.scene.config)  # the first call that names it is the first swept
        self.undisturbed = 0  # the exit code of a run that nothing disturbs
        self.living = tuple(living)
        self.others: dict[str, bytes] = {}  # the records of `living`
        self.earlier: set[str] = set()  # the tokens of an earlier run of the job
        self.wrong: list[str] = []
        self._outside: object = None

    def set_out(self) -> None:
        """Bring the node into the state that the program starts from, and keep it."""
        self.prepare()
        self.stage.save()
        self.others = self.stage.records(*self.living) if self.living else {}
        self._outside = self.stage.outside()

    @abstractmethod
    def prepare(self) -> None:
        """Bring the node into the state that the program starts from."""

    @abstractmethod
    def run(self, head: Sequence[str] = ()) -> int:
        """Run the program behind `head`; return its exit code."""

    @abstractmethod
    def proper(self) -> None:
        """Expect, after an undisturbed run, that the case is what it is called."""

    @abstractmethod
    def course(self, code: int) -> None:
        """Take the scheduler's own course after the program ended with `code`."""

    def check(self, point: Point, code: int) -> list[str]:
        """Return what does not hold after a fault at `point`."""
        self.wrong = []
        codes = (KILLED,) if point.kind == KILL else self.codes
        self.expect(code in codes, f"it exits {code}")
        self.unharmed("the fault")
        self.boot_rule()
        self.course(code)
        self.expect(self.stage.outside() == self._outside, "it touched files that are not its own")
        return self.wrong

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(otherwise)

    def unharmed(self, by: str) -> None:
        """Expect the living jobs' locks as they were."""
        now = self.stage.records(*self.living) if self.living else {}
        self.expect(now == self.others, f"{by} changed another job's locks: {sorted(now)}")

    def boot_rule(self) -> None:
        """Expect that the boot is known on both sides before a claim: else a loss goes unseen."""
        node = self.stage.node
        if list_names(node.store.claims_dir):
            known = {
                node.store.boot_id(),
                atomic.read_text(f"{node.settings.state_dir}/boot_id").strip(),
            }
            self.expect(known == {node.boot_id}, f"there are claims, and known boots are {known}")

    def keeps_nothing(self) -> None:
        """Expect of a job that was refused no lock but of an earlier run, and none cut short."""
        held = [name for name, lock in self.stage.locks().items() if lock.owner is None]
        held += self.mine_now()
        self.expect(not held, f"it refuses and keeps {held}")

    def mine_now(self) -> dict[str, Lock]:
        """Return the locks of the job, but for those of an earlier run."""
        held = self.stage.locks(MINE).items()
        return {n: lock for n, lock in held if lock.owner and lock.owner.token not in self.earlier}

    def holds_whole(self, count: int) -> list[str]:
        """Expect whole locks of so many devices, of one claim; return their indexes."""
        mine = self.mine_now()
        records = [lock.owner for lock in mine.values() if lock.owner]
        self.expect(len(mine) == count, f"a job that starts holds {sorted(mine)}")
        self.expect(len({record.token for record in records}) <= 1, "its locks are of two claims")
        self.expect(all(set(r.devices) == set(mine) for r in records), "its locks are not whole")
        cards = {name.partition(SHARE)[0] for name in mine}
        return [str(d.index) for d in self.stage.node.devices() if d.id in cards]

    def settled(self) -> None:
        """Expect that one reconcile leaves the living owners' locks and nothing else."""
        stage = self.stage
        stage.reconcile()
        self.unharmed("the reconcile")
        left = sorted(set(stage.locks()) - set(self.others))
        self.expect(not left, f"still locked after a reconcile: {left}")
        rest = len(stage.node.devices()) - len(self.others)
        try:
            grant = stage.claim_rest(rest)
        except Refusal as refusal:
            self.wrong.append(f"afterwards nothing is granted: {refusal.why}")
            return
        twice = {d.id for d in grant.devices} & set(self.others)
        self.expect(not twice, f"granted twice: {sorted(twice)}")
        self.unharmed("the next claim")


class Case(NamedTuple):
    """A play by name; a sample has every `thin`-th of the points that it would have, 0: all."""

    name: str
    make: Callable[[Path], Play]
    thin: int = 1
