# SPDX-License-Identifier: Apache-2.0
"""How long the hooks take as whole processes, next to a bare interpreter and to a shell prolog."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.bench.disturbed import take_locks_away
from tests.bench.rounds import Act, Recorder, Samples, alone, importing, run_rounds, timing
from tests.bench.slurm_hooks import SlurmBench
from tests.support.scene import Scene
from tests.support.starter import Shepherd, Starter

PEER = Path(__file__).with_name("peer.sh")
PEER_EPILOG = Path(__file__).with_name("peer_epilog.sh")
QSTAT_ANSWER = "job_number:  1\nowner:  user\nhard resource_list:         gpu=2\n"
NAMES = ("prolog", "epilog")


class SgeBench:
    """The acts of a round under Grid Engine; every one leaves the node as it found it."""

    def __init__(self, scene: Scene, parent: Shepherd, samples: Samples) -> None:
        self._recorder = Recorder(scene, parent, samples)
        self._scene = scene
        self._env = parent.environment()
        self._pid = str(parent.pid)
        self._job = (self._env["JOB_ID"], self._env["SGE_TASK_ID"], self._env["QUEUE"])
        self._environment = parent.job.folder / "environment"
        self._text = self._environment.read_bytes()
        self._peer_locks = scene.root / "peer"
        self._peer_locks.mkdir()
        self._answer = scene.root / "qstat.txt"
        self._answer.write_text(QSTAT_ANSWER)
        hooks = (scene.hooks.prolog, scene.hooks.epilog)
        self._prolog, self._epilog = map(str, hooks)
        self._imports = [importing(path) for path in hooks]
        self._timed = [timing(path) for path in hooks]
        self._epilog_alone = alone(scene, scene.hooks.epilog, parent.pid)

    def acts(self) -> list[Act]:
        """Return what a round does, in any order."""
        return [
            self.floor,
            self.bare,
            self.imports,
            self.direct,
            self.launched,
            self.alone,
            self.peer,
            self.inside,
        ]

    def floor(self) -> None:
        """Start the hooks' interpreter and do nothing."""
        self._run("floor", self._scene.interpreter, "-IS", "-c", "pass")

    def bare(self) -> None:
        """Start the smallest program."""
        self._run("true", "/bin/true")

    def imports(self) -> None:
        """Import what the hooks import, and stop there."""
        for name, hook in zip(NAMES, self._imports):
            self._run(f"{name} imports", hook, self._pid)

    def direct(self) -> None:
        """Claim and release without the launcher."""
        self._pair("", [self._prolog, self._pid], [self._epilog, self._pid])

    def alone(self) -> None:
        """Release where the last guard has one process to look at, instead of all."""
        self._pair(", alone", [self._prolog, self._pid], [self._epilog_alone, self._pid])

    def launched(self) -> None:
        """Claim and release as the queue is configured."""
        clean, launch = str(self._scene.hooks.clean), str(self._scene.hooks.launch)
        job = self._job
        self._pair(
            "+launch", [clean, launch, self._prolog, *job], [clean, launch, self._epilog, *job]
        )

    def peer(self) -> None:
        """Claim and release in shell."""
        gpus = str(len(self._scene.simulated.machine.gpus))
        self._run("shell prolog", str(PEER), str(self._peer_locks), str(self._answer), gpus)
        if len(list(self._peer_locks.iterdir())) != 2:
            raise RuntimeError("the shell prolog did not lock 2 devices")
        self._run("shell epilog", str(PEER_EPILOG), str(self._peer_locks))
        self._restore()

    def inside(self) -> None:
        """Time main() inside the process."""
        for name, hook in zip(NAMES, self._timed):
            self._recorder.timed_inside(f"{name} main()", [hook, self._pid], self._env)
        self._restore()

    def restore(self) -> None:
        """Put the node back to before an act that failed."""
        take_locks_away(self._scene.node())
        shutil.rmtree(self._peer_locks)
        self._peer_locks.mkdir()
        self._restore()

    def _pair(self, suffix: str, prolog: Sequence[str], epilog: Sequence[str]) -> None:
        self._run(f"prolog{suffix}", *prolog)
        self._recorder.held(2, "the prolog")
        self._run(f"epilog{suffix}", *epilog)
        self._recorder.held(0, "the epilog")
        self._restore()

    def _run(self, row: str, *argv: str) -> None:
        self._recorder.timed(row, argv, self._env)

    def _restore(self) -> None:
        self._environment.write_bytes(self._text)


def measure(scene: Scene, slurm: Scene, rounds: int, seed: int) -> Samples:
    """Return the milliseconds of every row in every round; each scheduler has its own node."""
    samples: Samples = {}
    with (
        Shepherd(scene.spool(1, 2)) as shepherd,
        Starter(slurm.root, "slurmd") as slurmd,
        Starter(slurm.root, "python", SlurmBench.TITLE, SlurmBench.USER) as task,
    ):
        sge = SgeBench(scene, shepherd, samples)
        slurm_acts = SlurmBench(slurm, slurmd, task, samples).acts()

        def restore() -> None:
            sge.restore()
            take_locks_away(slurm.node())

        run_rounds([*sge.acts(), *slurm_acts], samples, rounds, seed, restore)
    return samples
