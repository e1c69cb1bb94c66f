# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's hooks with ISOLATION=cgroup are stopped: on this machine's own cgroups (root).

The simulated node has real device nodes without a driver behind them, and its shepherds live in
cgroups of a service of their own. A job that starts must be confined; once it is over and one
reconcile came by, no cgroup and no program of ours is left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpulock.isolation import job, tree
from gpulock.node.procfs import Proc
from tests.labs.common.device_nodes import PROBE, Service, make_nodes, opened, programs
from tests.support.starter import Shepherd, Starter
from tests.sweep.beside import await_end, beside
from tests.sweep.play import Case, Play
from tests.sweep.sge import Epilog, Prolog, Reap, SgePlay, SgeStage
from tests.sweep.stage import MINE, Stage

GPUS = 8
ALL = {f"nvidia{n}" for n in range(GPUS)}


class ConfinedNode(Stage):
    """A stage with real device nodes, on which every job is confined; one is the victim's.

    `key` names its cgroups, `keeper` is the process that they are made for.
    """

    key: str
    keeper: Starter

    def confine_jobs(self, root: Path, *daemons: int) -> None:
        """Lay out devices and settings; let these processes live in cgroups of a service."""
        self.dev, self.probe = root / "dev", root / "probe.py"
        make_nodes(self.dev, GPUS)
        self.configure(ISOLATION="cgroup", SYS_ROOT="/sys", DEV_ROOT=str(self.dev))
        self.probe.write_text(PROBE)
        (self.proc / "devices").write_text(Path("/proc/devices").read_text())
        self.service = Service(f"gpulock-sweep-{os.getpid()}.service", *daemons)

    def is_near(self, call: str) -> bool:
        """Return whether a traced call is on what a hook may change: cgroups are, too."""
        return super().is_near(call) or self.service.name in call

    def empty_cgroups(self) -> None:
        """Let the cgroups of the job be empty, as at its keeper's end."""
        self.service.take_in(self.keeper.pid)

    def start(self) -> int:
        """Return the start time of the keeper."""
        return Proc().start(self.keeper.pid)

    def confine(self) -> None:
        """Confine the job as its hook does."""
        granted = [d for d in self.node.devices() if d.id in self.locks(MINE)]
        isolated = job.IsolatedJob(self.key, self.keeper.pid, self.start())
        job.begin_job_isolation(self.node, isolated, granted)

    def cgroups(self) -> list[Path]:
        """Return the cgroups of the job."""
        name = tree.cgroup_name(self.key, self.keeper.pid, self.start())
        folder = self.service.folder / name
        return [folder] if folder.exists() else []

    def opens(self) -> dict[str, set[str]]:
        """Return what a process of the job may open, by error."""
        program = ["/usr/bin/python3", "-IS", str(self.probe), str(self.dev)]
        run = self.keeper.run(program, {}, stderr=str(self.stderr), proc=str(self.proc))
        self.must(run.status, 0)
        return opened(self.stderr.read_text())


class ConfinedPlay(Play):
    """What every case expects beside the locks."""

    node: ConfinedNode
    programs: set[int]  # that are there before, and stay

    def opens_only(self, names: set[str]) -> None:
        """Expect that a process of the job opens these devices and no other."""
        seen = self.node.opens()
        right = {"ENXIO": names | {"nvidiactl"}, "EPERM": ALL - names}
        self.expect(seen == right, f"it holds {sorted(names)} and may open {seen}")

    def settled(self) -> None:
        """Expect nothing of the job after the reconcile."""
        super().settled()
        left = [str(path) for path in self.node.cgroups()]
        self.expect(not left, f"after a reconcile there is still {left}")
        more = programs() - self.programs
        self.expect(not more, f"programs {more} are left")


class ConfinedStage(ConfinedNode, SgeStage):
    """The stage of Grid Engine; on it every job is confined."""

    key = f"{MINE}.1"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keeper = self.mine
        self.confine_jobs(root, self.mine.pid, self.other.pid)
        self.confined = False  # whether the job whose hook is stopped had its prolog already
        self.orphaned = False  # and whether its shepherd is gone

    def close(self) -> None:
        """Remove the cgroups, and end the shepherds."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            stack.callback(self.service.close)
            self.empty_cgroups()

    def hook(self, shepherd: Shepherd, name: str, head: Sequence[str] = ()) -> int:
        """Run prolog or epilog of a job, `head` beside it; return the exit code."""
        inside = self.cgroups() if shepherd is self.mine else []
        argv = beside(head, self.command(shepherd, name), inside, [self.service.folder])
        status = self.run(shepherd, argv)
        await_end(head, self.log)
        return status

    def reset(self) -> None:
        """Bring back the files, and the cgroups as they were after the prolog or before it."""
        super().reset()
        self.empty_cgroups()
        for path in self.cgroups():
            path.rmdir()
        if self.orphaned:
            self.link(self.mine.pid)
        if self.confined:
            self.confine()
        if self.orphaned:
            self.empty_cgroups()
            self.unlink(self.mine.pid)


class Confined(ConfinedPlay, SgePlay):
    """A case of Grid Engine."""

    sets = ConfinedStage
    node: ConfinedStage

    def set_out(self) -> None:
        """Note what the other job has."""
        super().set_out()
        self.node.confined = self.node.cgroups() != []
        there = programs()
        self.programs = there - {max(there)} if self.node.confined else there  # but the job's

    def granted(self) -> None:
        """Expect whole locks of two devices, a mask that names them, and no other to open."""
        indexes = self.holds_whole(2)
        mask = self.node.mask(self.node.mine.job)
        own = [device for device in self.node.node.devices() if str(device.index) in indexes]
        self.expect(mask == [",".join([d.uuid for d in own])], f"mask {mask}, not {indexes}")
        self.opens_only({f"nvidia{device.minor}" for device in own})

    def settled(self) -> None:
        """Let the shepherd end."""
        self.node.empty_cgroups()
        super().settled()


class ConfinedProlog(Confined, Prolog):
    """The prolog is stopped."""


class ConfinedEpilog(Confined, Epilog):
    """The epilog is stopped."""

    def proper(self) -> None:
        """Expect that it frees what the job had, and removes its cgroups."""
        super().proper()
        self.expect(not self.node.cgroups(), "undisturbed, it does not remove")


class ConfinedReap(Confined, Reap):
    """The reconcile is stopped that removes what a killed shepherd has left."""

    def prepare(self) -> None:
        """Let the job claim, and its shepherd be killed."""
        super().prepare()
        self.stage.must(self.node.hook(self.node.mine, "prolog"), 0)
        self.node.empty_cgroups()
        self.node.unlink(self.node.mine.pid)
        self.node.orphaned = True

    def proper(self) -> None:
        """Expect that it frees and removes what the dead hold."""
        super().proper()
        self.expect(not self.node.cgroups(), "undisturbed, it does not remove")

    def course(self, code: int) -> None:
        """Let the next reconcile come."""
        del code
        self.settled()


CASES = (
    Case("confined prolog", ConfinedProlog),
    Case("confined epilog", ConfinedEpilog),
    Case("confined reap", ConfinedReap),
)
