# SPDX-License-Identifier: Apache-2.0
"""Slurm's TaskProlog and Epilog are stopped, and a reconcile that finds locks of its jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.sweep.play import REAP_CODES, Case
from tests.sweep.slurm_play import FREE, HELD, SlurmPlay
from tests.sweep.slurm_stage import ShardStage
from tests.sweep.stage import GONE, MINE, OTHER

QUEUED, ENDED, ALONE = 1000, 1004, 1005  # more jobs


class Task(SlurmPlay):
    """The TaskProlog is stopped: the task starts with the whole mask, or not at all."""

    codes = (0, 1, 213)  # 213: REQUEUE_EXIT

    def prepare(self) -> None:
        """Let the job claim."""
        super().prepare()
        self.stage.must(self.node.prolog(self.mine), 0)
        self.marker = str(self.node.task_config)
        self.undisturbed = self.task()
        self._said = self.stage.stderr.read_text()
        self._inside = self.stage.inside()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the TaskProlog."""
        return self.task(head)

    def proper(self) -> None:
        """Expect that the task starts, unless Slurm gave devices that another job holds."""
        right = self.mine.positions != HELD
        self.expect(self.starts() == right, "undisturbed, it is another case")

    def names_nothing(self, said: str) -> bool:
        """Return whether only Slurm's own mask is said: which devices open could not be seen."""
        masks = [
            {line for line in text.splitlines() if line.startswith("export CUDA_VISIBLE_DEVICES=")}
            for text in (said, self._said)
        ]
        return "unset GPULOCK_DEVICES\n" in said and masks[0] == masks[1]

    def course(self, code: int) -> None:
        """Look at what was said; nothing was changed, so nothing else follows."""
        said = self.stage.stderr.read_text()
        if code == 0:
            self.expect(self.undisturbed == 0, f"a task of a refused job starts: {said}")
            self.expect(said == self._said or self.names_nothing(said), f"another mask: {said}")
        self.expect(self.stage.inside() == self._inside, "it changed files")


class Epilog(SlurmPlay):
    """The Epilog is stopped; `left` says that a process of the job is left for a while."""

    def __init__(
        self,
        root: Path,
        positions: str = FREE,
        selection: str = "gpulock",
        *,
        process: bool = False,
    ) -> None:
        super().__init__(root, positions, selection)
        self._process = process

    def prepare(self) -> None:
        """Let the job claim."""
        super().prepare()
        self.stage.must(self.node.prolog(self.mine), 0)
        if self._process:
            self._members = self.node.leave_process(self.mine)
            self._stat = self._members.stat()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the Epilog."""
        return self.node.epilog(self.mine, head)

    def proper(self) -> None:
        """Expect that it frees what nobody uses."""
        held = len(self.stage.locks(MINE))
        self.expect(held == (2 if self._process else 0), f"undisturbed, it leaves {held} locks")

    def course(self, code: int) -> None:
        """Let the last process go, and slurmctld forget the job."""
        del code
        self.told_rightly()
        if not self._process:
            self.over(self.mine)
            return
        self.expect(len(self.stage.locks(MINE)) == 2, "it frees what a process may still use")
        before = self._members.read_text()
        self._members.write_text("")
        self.over(self.mine)
        self._members.write_text(before)
        os.utime(self._members, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


class SharingEpilog(Epilog):
    """Another job has shards of the same devices, and keeps its places."""

    sets = ShardStage


class Reap(SlurmPlay):
    """A reconcile is stopped: two of three jobs are over, of the third slurmctld knows."""

    codes = REAP_CODES

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gone = self.node.job(GONE, "0,1")
        self.ended_job = self.node.job(ENDED, "0")
        self.alone = self.node.job(ALONE, "0")
        self.living = (OTHER, ALONE)

    def prepare(self) -> None:
        """Let all claim and be seen by a reconcile; then two jobs end without an Epilog."""
        super().prepare()
        for job in (self.gone, self.ended_job, self.alone):
            self.stage.must(self.node.prolog(job), 0)
            self.node.answer(job, "RUNNING")
        self.stage.reconcile()
        self.node.forget(self.gone)
        self.node.answer(self.ended_job, "COMPLETED")
        for lock in self.stage.locks(ENDED).values():
            assert lock.owner
            self.stage.node.store.mark_seen(lock.owner.token)  # here slurmctld may be silent
        self.stage.leave_cut_short()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the reconcile."""
        return self.node.by_slurmd(
            [*head, *self.stage.command_of("reap")], {"PATH": "/usr/bin:/bin"}
        )

    def proper(self) -> None:
        """Expect that it frees what the dead hold."""
        self.expect(set(self.stage.locks()) == set(self.others), "undisturbed, it does not free")

    def course(self, code: int) -> None:
        """Reconcile."""
        del code
        self.expect(not self.node.told(), "a reconcile tells slurmctld nothing")
        self.over(self.gone, self.ended_job)
        self.node.answer(self.ended_job, "COMPLETED")


class PutBack(SlurmPlay):
    """A reconcile is stopped that finds no locks, and puts back those of two jobs."""

    codes = REAP_CODES

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.living = ()  # there are no lock directories to begin with
        self._before: dict[str, str] = {}

    def prepare(self) -> None:
        """Let two jobs claim, and lose their locks."""
        super().prepare()
        for job in (self.other, self.mine):
            self.stage.must(self.node.prolog(job), 0)
            self.node.answer(job, "RUNNING")
        self._before = self.holders()
        self.node.lose_locks()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the reconcile."""
        return self.node.by_slurmd(
            [*head, *self.stage.command_of("reap")], {"PATH": "/usr/bin:/bin"}
        )

    def proper(self) -> None:
        """Expect that all locks are back."""
        self.expect(self.holders() == self._before, "undisturbed, it puts nothing back")

    def holders(self) -> dict[str, str]:
        """Return the token of each lock."""
        locks = self.stage.locks(OTHER, MINE).items()
        return {name: lock.owner.token for name, lock in locks if lock.owner}

    def course(self, code: int) -> None:
        """Reconcile, let the job go on, and end."""
        del code
        self.expect(self.holders() == self._before, "a record is gone")
        self.stage.reconcile()
        self.expect(self.holders() == self._before, "not all locks are back")
        self.expect(self.starts(), "the job's next task does not start")
        self.others = self.stage.records(OTHER)
        self.living = (OTHER,)
        try:
            self.ended()
        finally:
            self.others, self.living = {}, ()


CASES = (
    Case("slurm task", Task, thin=0),
    Case("slurm task, step", partial(Task, selection="slurm", step="0", sees="1"), thin=0),
    Case("slurm task, no GPU", partial(Task, positions=""), thin=0),
    Case("slurm task, refused", partial(Task, positions=HELD, selection="slurm"), thin=0),
    Case("slurm task, component", partial(Task, step="0", leader=QUEUED), thin=0),
    Case("slurm epilog", Epilog, thin=2),
    Case("slurm epilog, a process left", partial(Epilog, process=True), thin=4),
    Case("slurm epilog, shards", partial(SharingEpilog, positions=HELD, selection="slurm"), thin=2),
    Case("slurm reap", Reap, thin=6),
    Case("slurm reap, puts back", PutBack, thin=6),
)
