# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks with ISOLATION=cgroup are stopped: on this machine's own cgroups (root).

The PAM session of a step is opened and closed below a process that shows the step's title; slurmd
and the step daemons live in cgroups of a service of their own. A step that starts must be
confined; once its job is over and one reconcile came by, no cgroup and no program of ours is left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tests.labs.common.device_nodes import programs
from tests.support.slurm_calls import BATCH, SlurmJob
from tests.support.starter import Starter
from tests.sweep.beside import await_end, beside
from tests.sweep.isolated import ConfinedNode, ConfinedPlay
from tests.sweep.play import Case
from tests.sweep.slurm_play import SlurmPlay
from tests.sweep.slurm_stage import SlurmStage
from tests.sweep.stage import MINE

OPEN, CLOSE = "open_session", "close_session"  # PAM_TYPE of pam_exec(8)


class ConfinedSlurmStage(ConfinedNode, SlurmStage):
    """The stage of Slurm, on which every step is confined; of one job the batch step is there."""

    key = f"{MINE}.{BATCH}"

    def __init__(self, root: Path, selection: str) -> None:
        super().__init__(root, selection)
        self.keeper = Starter(root, "slurmstepd", self.job(MINE).title())
        self.link(self.keeper.pid)
        daemons = [int(path.name) for path in self.proc.iterdir() if path.name.isdigit()]
        daemons.remove(os.getpid())
        self.confine_jobs(root, *daemons)
        self._session = self.scene.hooks.folder / "prolog/slurm-session"
        self._confined = False  # whether the step had its session already, when all was saved
        self._over = False  # and whether it was over

    def close(self) -> None:
        """Remove the cgroups, and end all daemons."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            stack.callback(self.keeper.end)
            stack.callback(self.service.close)
            self.end_step()

    def session(self, act: str, head: Sequence[str] = ()) -> int:
        """Open or close the session of the step, behind `head`; return the exit code.

        It takes the job from its parent.
        """
        self.log.unlink(missing_ok=True)
        argv = beside(head, [str(self._session)], self.cgroups(), [self.service.folder])
        env = {"PAM_TYPE": act, "PAM_USER": "labslurm", "PAM_SERVICE": "slurm"}
        run = self.keeper.run(argv, env, proc=str(self.proc), stderr=str(self.stderr))
        await_end(head, self.log)
        return run.status

    def epilog(self, job: SlurmJob, head: Sequence[str] = ()) -> int:
        """Run the Epilog of a job, `head` beside it; return the exit code."""
        outside = [self.service.folder]
        argv = beside(head, [str(self._epilog)], outside, outside)
        status = self.by_slurmd(argv, job.epilog(gpus=False))
        await_end(head, self.log)
        return status

    def end_step(self) -> None:
        """Let the step be over: its daemon ends, and its cgroup is empty."""
        self.empty_cgroups()
        if self._shows():
            self.unlink(self.keeper.pid)

    def save(self) -> None:
        """Keep whether the step is confined, and whether it is over, too."""
        super().save()
        self._confined, self._over = self.cgroups() != [], not self._shows()

    def reset(self) -> None:
        """Bring back the files, and the step as it was."""
        super().reset()
        self.end_step()
        for path in self.cgroups():
            path.rmdir()
        self.link(self.keeper.pid)
        if self._confined:
            self.confine()
        if self._over:
            self.end_step()

    def _shows(self) -> bool:
        return (self.proc / str(self.keeper.pid)).is_symlink()


class Confined(ConfinedPlay, SlurmPlay):
    """A case of Slurm."""

    sets = ConfinedSlurmStage
    node: ConfinedSlurmStage

    def prepare(self) -> None:
        """Let the job claim; its Prolog closes slurmd's own cgroup, which stays closed."""
        super().prepare()
        self.stage.must(self.node.prolog(self.mine), 0)
        self.programs = programs()

    def confined(self) -> None:
        """Expect that the step opens what its job holds, and no other."""
        indexes = self.holds_whole(2)
        minors = [d.minor for d in self.node.node.devices() if str(d.index) in indexes]
        self.opens_only({f"nvidia{minor}" for minor in minors})

    def course(self, code: int) -> None:
        """Let the step be over, and its job."""
        del code
        self.told_rightly()
        self.node.end_step()
        self.ended()


class SessionOpens(Confined):
    """The session is stopped while it is opened: the step starts confined, or not at all."""

    codes = (0, 1)

    def run(self, head: Sequence[str] = ()) -> int:
        """Open the session."""
        return self.node.session(OPEN, head)

    def proper(self) -> None:
        """Expect that the step is confined."""
        self.confined()

    def course(self, code: int) -> None:
        """Look at a step that starts, and close its session; no other has one."""
        if code == 0:
            self.confined()
            self.stage.reconcile()
            self.confined()
            self.stage.must(self.node.session(CLOSE), 0)
        super().course(code)


class SessionCloses(Confined):
    """The session is stopped while it is closed; slurmstepd logs how that ended, and goes on."""

    codes = (0, 1)

    def prepare(self) -> None:
        """Let the step start."""
        super().prepare()
        self.stage.must(self.node.session(OPEN), 0)

    def run(self, head: Sequence[str] = ()) -> int:
        """Close the session."""
        return self.node.session(CLOSE, head)

    def course(self, code: int) -> None:
        """Expect that slurmctld was told nothing: the job has done what it was to do."""
        told = self.node.told()
        self.expect(not told, f"slurmctld was told {told}")
        super().course(code)

    def proper(self) -> None:
        """Expect that nothing of it is left."""
        self.expect(not self.node.cgroups(), "undisturbed, it does not remove")


class EpilogAfterStep(Confined):
    """The Epilog is stopped, of a job whose step was killed: its session was never closed."""

    def prepare(self) -> None:
        """Let the step start, and be killed."""
        super().prepare()
        self.stage.must(self.node.session(OPEN), 0)
        self.node.end_step()

    def run(self, head: Sequence[str] = ()) -> int:
        """Run the Epilog."""
        return self.node.epilog(self.mine, head)

    def proper(self) -> None:
        """Expect that nothing is left."""
        self.expect(not self.stage.locks(MINE), "undisturbed, it does not free")
        self.expect(not self.node.cgroups(), "undisturbed, it does not remove")

    def course(self, code: int) -> None:
        """Let slurmctld forget the job, and one reconcile come by."""
        del code
        self.told_rightly()
        self.over(self.mine)


CASES = (
    Case("confined session opens", SessionOpens),
    Case("confined session closes", SessionCloses),
    Case("confined Epilog", EpilogAfterStep),
)
