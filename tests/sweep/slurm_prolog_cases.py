# SPDX-License-Identifier: Apache-2.0
"""Slurm's Prolog is stopped: where gpulock chooses, where Slurm does, and where it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from tests.sweep.play import Case
from tests.sweep.slurm_play import HELD, SlurmPlay
from tests.sweep.slurm_stage import ShardStage
from tests.sweep.stage import GONE, MINE


class Prolog(SlurmPlay):
    """The Prolog is stopped; undisturbed, the job gets its devices."""

    codes = (0, 1)
    grants = True

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the Prolog."""
        return self.node.prolog(self.mine, head)

    def proper(self) -> None:
        """Expect that undisturbed the case is what it is called."""
        self.expect(self.starts() == self.grants, "undisturbed, it is another case")
        self.told_rightly()

    def course(self, code: int) -> None:
        """Run the TaskProlog where the Prolog succeeded, then the Epilog."""
        self.told_rightly()
        if code == 0 and self.starts():
            self.stage.reconcile()
            self.unharmed("a reconcile")
            self.expect(self.starts(), "after a reconcile its tasks do not start")
        elif code in self.codes:
            self.keeps_nothing()
        self.ended()


class Draining(Prolog):
    """Devices are short, and an Epilog gave some up before the processes of its job were gone."""

    def prepare(self) -> None:
        """Let a job's Epilog find a process, which goes later."""
        super().prepare()
        gone = self.node.job(GONE, "0,1,4,5,6")
        self.stage.must(self.node.prolog(gone), 0)
        left = self.node.leave_process(gone)
        self.stage.must(self.node.epilog(gone), 0)
        left.write_text("")
        if len(self.stage.locks(GONE)) != 5:
            raise RuntimeError("the Epilog freed what a process may still use")


class Again(Prolog):
    """The job ran here before, and its Epilog never did."""

    def prepare(self) -> None:
        """Run the Prolog of the first run."""
        super().prepare()
        self.stage.must(self.run(), 0)
        self.earlier = {one.owner.token for one in self.stage.locks(MINE).values() if one.owner}
        self.mine = dataclasses.replace(self.mine, restart=1)
        self.env |= self.mine.task(self.step, self.sees)  # Slurm counts the run for its tasks, too


class Sharing(Prolog):
    """Another job has shards of the same devices, and keeps its places."""

    sets = ShardStage


class Refused(Prolog):
    """Slurm gave devices that another job holds."""

    grants = False


HELD_NOW = partial(Refused, positions=HELD, selection="slurm")
CASES = (
    Case("slurm prolog", Prolog, thin=3),
    Case("slurm prolog, Slurm chooses", partial(Prolog, selection="slurm"), thin=3),
    Case("slurm prolog, no GPU", partial(Prolog, positions="")),
    Case("slurm prolog, first of a boot", partial(Prolog, first=True), thin=3),
    Case("slurm prolog, settles", Draining, thin=6),
    Case("slurm prolog, run again", Again, thin=6),
    Case("slurm prolog, shards", partial(Sharing, positions=HELD, selection="slurm"), thin=3),
    Case("slurm prolog, refused", HELD_NOW, thin=6),
    Case("slurm prolog, refused srun", partial(HELD_NOW, batch=False), thin=6),
)
