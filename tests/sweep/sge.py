# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's prolog, epilog and reap: from which state they are stopped, and what follows.

A prolog that failed or was killed has its epilog run, then the shepherd ends, then one reconcile
comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.support.execd import SpooledJob
from tests.support.starter import Shepherd
from tests.sweep.play import REAP_CODES, Case, Play
from tests.sweep.stage import GONE, MINE, OTHER, Stage

PROLOG_CODES = (0, 1, 99, 100)


class SgeStage(Stage):
    """Three jobs: the hooks of `mine` are stopped; `other` lives and holds two devices all the
    time; a third one died and left its locks. A shepherd dies by losing its link in PROC_ROOT.
    """

    kept = ("run", "state", "sge")  # LOCK_DIR, STATE_DIR, the spool

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.mine = self._start(MINE, 2)
        self.other = self._start(OTHER, 2)

    def close(self) -> None:
        """End the shepherds."""
        self.mine.end()
        self.other.end()

    def _start(self, job_id: int, gpus: int) -> Shepherd:
        shepherd = Shepherd(self.scene.spool(job_id, gpus))
        self.link(shepherd.pid)
        return shepherd

    def hook(self, shepherd: Shepherd, name: str, head: Sequence[str] = ()) -> int:
        """Run prolog or epilog of a job, behind `head`; return the exit code."""
        return self.run(shepherd, [*head, *self.command(shepherd, name)])

    def command(self, shepherd: Shepherd, name: str) -> list[str]:
        """Return the command of a hook, below its shepherd."""
        paths = {"prolog": self.scene.hooks.prolog, "epilog": self.scene.hooks.epilog}
        return [str(paths[name]), str(shepherd.pid)]

    def run(self, shepherd: Shepherd, argv: Sequence[str]) -> int:
        """Run a program as a child of a shepherd; return the exit code."""
        env = shepherd.job.hook_environ()
        return shepherd.run(argv, env, proc=str(self.proc), stderr=str(self.stderr)).status

    def leave_dead_locks(self, gpus: int) -> None:
        """Let a job claim, and die without an epilog."""
        gone = self._start(GONE, gpus)
        self.must(self.hook(gone, "prolog"), 0)
        self.unlink(gone.pid)
        gone.end()

    def mask(self, job: SpooledJob) -> list[str]:
        """Return what the job's environment file says of CUDA_VISIBLE_DEVICES, every time."""
        lines = (job.folder / "environment").read_text().splitlines()
        return [
            v for k, _, v in (line.partition("=") for line in lines) if k == "CUDA_VISIBLE_DEVICES"
        ]


class SgePlay(Play):
    """A hook to be stopped, on a node where a dead job left `gone` locks.

    `first`: nothing was claimed in this boot yet, so there is no other job either.
    """

    sets: type[SgeStage] = SgeStage  # the stage it plays on

    def __init__(self, root: Path, *, gone: int = 0, first: bool = False) -> None:
        self.node = self.sets(root)
        super().__init__(self.node, () if first else (OTHER,))
        self.gone = gone

    def prepare(self) -> None:
        """Let the other job claim, and the third one die."""
        if self.living:
            self.stage.must(self.node.hook(self.node.other, "prolog"), 0)
        if self.gone:
            self.node.leave_dead_locks(self.gone)

    def course(self, code: int) -> None:
        """Let the shepherd end, then reconcile."""
        self.node.unlink(self.node.mine.pid)
        try:
            self.settled()
        finally:
            self.node.link(self.node.mine.pid)


class Prolog(SgePlay):
    """The prolog is stopped."""

    codes = PROLOG_CODES

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the prolog."""
        return self.node.hook(self.node.mine, "prolog", head)

    def proper(self) -> None:
        """Expect that the job is given what it asked for."""
        self.granted()

    def course(self, code: int) -> None:
        """Look at what the job was given, then run the epilog."""
        if code == 0:
            self.granted()
            self.stage.reconcile()
            self.granted()
        elif code in PROLOG_CODES:
            self.keeps_nothing()
        ended = self.node.hook(self.node.mine, "epilog")
        self.expect(ended == 0, f"the epilog exits {ended}")
        self.expect(not self.stage.locks(MINE), "the epilog left whole locks of its job")
        self.unharmed("the epilog")
        super().course(code)

    def granted(self) -> None:
        """Expect whole locks of two devices, and an environment that names just them."""
        indexes = self.holds_whole(2)
        mask = self.node.mask(self.node.mine.job)
        self.expect(mask == [",".join(indexes)], f"mask {mask}, but it holds {indexes}")


class Epilog(SgePlay):
    """The epilog is stopped."""

    def prepare(self) -> None:
        """Let the job claim."""
        super().prepare()
        self.stage.must(self.node.hook(self.node.mine, "prolog"), 0)

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the epilog."""
        return self.node.hook(self.node.mine, "epilog", head)

    def proper(self) -> None:
        """Expect that it frees what the job had."""
        self.expect(not self.stage.locks(MINE), "undisturbed, it does not free")


class Reap(SgePlay):
    """A reconcile is stopped."""

    codes = REAP_CODES

    def prepare(self) -> None:
        """Leave a claim that was cut short."""
        super().prepare()
        self.stage.leave_cut_short()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the reconcile."""
        return self.node.run(self.node.other, [*head, *self.stage.command_of("reap")])

    def proper(self) -> None:
        """Expect that it frees what the dead hold."""
        self.expect(set(self.stage.locks()) == set(self.others), "undisturbed, it does not free")


CASES = (
    Case("prolog", Prolog),
    Case("prolog, settles", partial(Prolog, gone=5)),
    Case("prolog, first of a boot", partial(Prolog, first=True)),
    Case("epilog", Epilog),
    Case("reap", partial(Reap, gone=2)),
)
