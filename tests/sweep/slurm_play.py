# SPDX-License-Identifier: Apache-2.0
"""What a fault in a hook of Slurm leads to: its own course, and what must hold on the way.

A Prolog that fails or is killed has its Epilog run, and the node is drained. After one that exits
0 the TaskProlog runs, as the job's user; a task whose TaskProlog fails does not start. An Epilog
is never run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpulock.job.environment import CONTAINER_PREFIXES, MASK_VARIABLES, grant_variable_names
from tests.support.slurm_calls import BATCH, SLURMD, SlurmJob
from tests.sweep.play import Play
from tests.sweep.slurm_stage import SlurmStage, tasks_environment
from tests.sweep.stage import MINE, OTHER

MASK, ORDINAL = "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
FORGED = {
    twin + name: "0,1,2,3,4,5,6,7" for twin in ("", *CONTAINER_PREFIXES) for name in MASK_VARIABLES
}
FREE, HELD = "0,1", "2,3"  # positions of which the other job has the latter


class SlurmPlay(Play):
    """A program on a node of Slurm. The job whose hooks run asks for `positions`.

    `selection` is who picks the devices; `sees` are the positions of a step that has not all of its
    job's. `first`: nothing was claimed in this boot yet, so there is no other job either.
    """

    sets: type[SlurmStage] = SlurmStage  # the stage it plays on

    def __init__(
        self,
        root: Path,
        positions: str = FREE,
        selection: str = "gpulock",
        *,
        first: bool = False,
        step: str = BATCH,
        sees: str | None = None,
        leader: int = 0,
        batch: bool = True,
    ) -> None:
        self.node = self.sets(root, selection)
        super().__init__(self.node, () if first else (OTHER,))
        self.mine: SlurmJob = self.node.job(MINE, positions, leader=leader, batch=batch)
        self.other: SlurmJob = self.node.job(OTHER, HELD)
        self.step = step
        self.sees = positions if sees is None else sees
        slurms = self.mine.task(step, self.sees)
        own = {name: value for name, value in FORGED.items() if name not in (MASK, ORDINAL)}
        self.env = {**(own if selection == "slurm" else FORGED), **slurms}

    def prepare(self) -> None:
        """Let the other job claim."""
        self.node.answer(self.mine, "RUNNING")
        if self.living:
            self.node.answer(self.other, "RUNNING")
            self.stage.must(self.node.prolog(self.other), 0)

    def task(self, head: Sequence[str] = ()) -> int:
        """Run the TaskProlog; return the exit code."""
        return self.node.task(self.mine, self.env, self.step, head)

    def starts(self) -> bool:
        """Return whether the job's tasks start: then they see just what it holds."""
        if self.task() != 0:
            return False
        try:
            env = tasks_environment(self.stage.stderr.read_text(), self.env)
        except ValueError as strange:
            self.wrong.append(str(strange))
            return True
        wanted = self.wanted()
        for name in sorted(grant_variable_names()):
            told, right = env.get(name), wanted.get(name)
            self.expect(told == right, f"a task has {name}={told}, not {right}")
        return True

    def wanted(self) -> dict[str, str]:
        """Return what a task must learn about the job's devices, which must be whole."""
        positions = [p for p in self.mine.positions.split(",") if p]
        indexes = self.holds_whole(len(positions))
        seen = [i for p, i in zip(positions, indexes) if p in self.sees.split(",")]
        uuids = ",".join([d.uuid for d in self.stage.node.devices() if str(d.index) in seen])
        pairs = {
            MASK: self.env.get(MASK, "") if self.mine.is_masked else ",".join(seen),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "NVIDIA_VISIBLE_DEVICES": uuids or "void",
            "GPULOCK_DEVICES": uuids,
        }
        stands = self.mine.is_masked and positions  # Slurm's own, which has no twin
        if not stands:
            pairs[ORDINAL] = pairs[MASK]
        found = {
            twin + name: text for twin in ("", *CONTAINER_PREFIXES) for name, text in pairs.items()
        }
        return found | ({ORDINAL: self.env[ORDINAL]} if stands else {})

    def ended(self) -> None:
        """Let the job end: its Epilog runs, slurmctld forgets it, a reconcile comes by."""
        code = self.node.epilog(self.mine)
        said = self.stage.stderr.read_text().strip()
        self.expect(code == 0, f"the Epilog exits {code}: {said}")
        self.expect(not self.stage.locks(MINE), f"the Epilog left whole locks of its job: {said}")
        self.expect(not self.node.note(self.mine).exists(), f"the Epilog left its note: {said}")
        self.unharmed("the Epilog")
        self.over(self.mine)

    def over(self, *jobs: SlurmJob) -> None:
        """Let slurmctld forget jobs, reconcile, and see what is left of them."""
        for job in jobs:
            self.node.forget(job)
        self.settled()
        for job in jobs:
            self.is_harmless(job)
        self.node.answer(self.mine, "RUNNING")

    def is_harmless(self, job: SlurmJob) -> None:
        """Expect that what is left of a job that is over shows no device, and locks none."""
        if self.node.note(job).exists() and self.node.task(job, job.task(), BATCH) == 0:
            env = tasks_environment(self.stage.stderr.read_text(), {})
            self.expect(env.get(MASK) == "", f"the note that is left shows {env.get(MASK)}")

    def told_rightly(self) -> None:
        """Expect that slurmctld heard about this job and this node alone."""
        names = (str(MINE), f"JobId={MINE}", f"NodeName={SLURMD}")
        for line in self.node.told():
            mine = any(word in names for word in line.split())
            self.expect(mine, f"slurmctld was told {line!r}")
