# SPDX-License-Identifier: Apache-2.0
"""How long Slurm's Prolog, TaskProlog and Epilog take: no launcher, slurmd starts them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.bench.rounds import (
    Act,
    Recorder,
    Samples,
    alone,
    configured,
    importing,
    timing,
)
from tests.support.scene import Scene
from tests.support.slurm_calls import USER, SlurmJob, users_settings, write_map
from tests.support.starter import Starter

JOB: Final = SlurmJob(2001, "0,1")


class SlurmBench:
    """The acts of a round under Slurm; every one leaves the node as it found it.

    Slurm chooses the devices, as is the default: the positions go through its map.
    """

    TITLE: Final = JOB.title()
    USER: Final = USER

    def __init__(self, scene: Scene, slurmd: Starter, task: Starter, samples: Samples) -> None:
        write_map(scene.node(), scene.root / "gres.conf")
        self._slurmd = Recorder(scene, slurmd, samples)
        self._task = Recorder(scene, task, samples)
        hooks = scene.hooks.folder
        self._prolog = hooks / "prolog/slurm"
        self._epilog = hooks / "epilog/slurm"
        settings = users_settings(scene.config.read_text())
        task_prolog = Path(configured(scene, hooks / "prolog/slurm-task", "task", settings))
        self._rows = (
            ("slurm prolog", self._slurmd, self._prolog, JOB.prolog()),
            ("slurm task", self._task, task_prolog, JOB.task()),
            ("slurm epilog", self._slurmd, self._epilog, JOB.epilog()),
        )
        self._imports = {row: importing(hook) for row, _, hook, _ in self._rows}
        self._timed = {row: timing(hook) for row, _, hook, _ in self._rows}
        self._alone = alone(scene, self._epilog, slurmd.pid)
        counted = f"{scene.config.read_text()}SLURM_DEVICE_SELECTION=gpulock\n"
        self._counted = configured(scene, self._prolog, "counted", counted)

    def acts(self) -> list[Act]:
        """Return what a round does, in any order."""
        return [self.imports, self.job, self.alone, self.counted, self.inside]

    def imports(self) -> None:
        """Import what the hooks import, and stop there."""
        for row, recorder, _, env in self._rows:
            recorder.timed(f"{row} imports", [self._imports[row]], env)

    def job(self) -> None:
        """Run a job's three hooks."""
        for (row, recorder, hook, env), held in zip(self._rows, (2, 2, 0)):
            recorder.timed(row, [str(hook)], env)
            recorder.held(held, row)

    def alone(self) -> None:
        """Release where the last guard has one process to look at, instead of all."""
        self._pair("", self._prolog, ", alone", Path(self._alone))

    def counted(self) -> None:
        """Claim where gpulock chooses the devices."""
        self._pair(", counted", Path(self._counted), "", self._epilog)

    def inside(self) -> None:
        """Time main() inside the process."""
        for row, recorder, _, env in self._rows:
            recorder.timed_inside(f"{row} main()", [self._timed[row]], env)

    def _pair(self, claiming: str, prolog: Path, releasing: str, epilog: Path) -> None:
        self._slurmd.timed(f"slurm prolog{claiming}", [str(prolog)], JOB.prolog())
        self._slurmd.held(2, "the Prolog")
        self._slurmd.timed(f"slurm epilog{releasing}", [str(epilog)], JOB.epilog())
        self._slurmd.held(0, "the Epilog")
