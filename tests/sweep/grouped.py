# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's hooks with ISOLATION=group are stopped: on real device nodes (root).

Whatever was stopped, a node is open to the group of a job that lives and holds it, or to root
alone; and once the job is over and one reconcile came by, none of its nodes is left to it.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpulock.isolation.group import MODE
from gpulock.sge.shepherds import EXECD
from tests.labs.common.device_nodes import modes
from tests.support.starter import Shepherd, Starter
from tests.sweep.isolated import ALL, IsolatedStage
from tests.sweep.play import Case
from tests.sweep.sge import Epilog, Prolog, Reap, SgePlay
from tests.sweep.stage import MINE

GROUPS = 50_000  # beyond those that anybody here has
DEVICE = 0o020000  # a character device


class GroupedStage(IsolatedStage):
    """On it the nodes belong to the groups of jobs; a simulation has none, so it is not marked."""

    isolation = "group"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.configure(SIMULATION="")
        self._execd = Starter(root, EXECD, own=True)
        self.link(self._execd.pid)
        params = self.scene.root / "proc/driver/nvidia/params"
        text = params.read_text()
        params.write_text(text.replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"))
        self._modes: dict[str, tuple[int, int, int]] = {}

    def close(self) -> None:
        """End execd too."""
        self._execd.end()
        super().close()

    def _start(self, job_id: int, gpus: int) -> Shepherd:
        """Start a job that has a group of its own."""
        shepherd = super()._start(job_id, gpus)
        config = shepherd.job.folder / "config"
        text = config.read_text()
        config.write_text(text.replace("add_grp_id=0\n", f"add_grp_id={GROUPS + job_id}\n"))
        return shepherd

    def save(self) -> None:
        """Keep the nodes' owners too."""
        super().save()
        self._modes = modes(self.dev)

    def reset(self) -> None:
        """Bring them back too."""
        super().reset()
        for name, (uid, gid, mode) in self._modes.items():
            os.chown(self.dev / name, uid, gid)
            os.chmod(self.dev / name, mode & 0o7777)

    def groups(self) -> dict[str, int]:
        """Return the group of every GPU's node that a group may open."""
        return {
            name: gid
            for name, (_, gid, mode) in modes(self.dev).items()
            if name in ALL and gid and mode & 0o070
        }

    def owed(self) -> dict[str, int]:
        """Return the group of every GPU's node that a living job holds."""
        minors = {device.id: device.minor for device in self.node.devices()}
        return {
            f"nvidia{minors[name]}": lock.owner.add_grp_id
            for name, lock in self.locks().items()
            if lock.owner and (self.proc / str(lock.owner.pid)).exists()
        }


class Grouped(SgePlay):
    """What every case expects beside the locks."""

    sets = GroupedStage
    node: GroupedStage

    def granted(self) -> None:
        """Expect whole locks of two devices, a mask that names them, and no other to open."""
        indexes = self.holds_whole(2)
        mask = self.node.mask(self.node.mine.job)
        own = [device for device in self.node.node.devices() if str(device.index) in indexes]
        self.expect(mask == [",".join([d.uuid for d in own])], f"mask {mask}, not {indexes}")
        self.follows("the prolog")

    def follows(self, after: str) -> None:
        """Expect every node to be its living job's, and all others to be root's alone."""
        there, owed = modes(self.node.dev), self.node.owed()
        wanted = {name: (0, owed.get(name, 0), DEVICE | MODE) for name in ALL}
        found = {name: there[name] for name in ALL}
        strange = {name: one for name, one in found.items() if one != wanted[name]}
        self.expect(not strange, f"after {after} nodes are {strange}, and jobs hold {owed}")

    def unharmed(self, by: str) -> None:
        """Expect the living jobs' nodes to be theirs, and nobody's to be another's."""
        super().unharmed(by)
        owed = self.node.owed()
        strange = {n: gid for n, gid in self.node.groups().items() if owed.get(n, gid) != gid}
        self.expect(not strange, f"{by} gave nodes to a stranger: {strange}, jobs hold {owed}")

    def settled(self) -> None:
        """Expect nothing of the job after the reconcile."""
        super().settled()
        mine = GROUPS + MINE
        left = [name for name, gid in self.node.groups().items() if gid == mine]
        self.expect(not left, f"after a reconcile the job's group still opens {left}")
        self.follows("a reconcile")


class GroupedProlog(Grouped, Prolog):
    """The prolog is stopped."""


class GroupedEpilog(Grouped, Epilog):
    """The epilog is stopped."""

    def proper(self) -> None:
        """Expect that it frees what the job had, and closes it."""
        super().proper()
        self.follows("it")


class GroupedReap(Grouped, Reap):
    """The reconcile is stopped that closes what a killed shepherd has left."""

    def prepare(self) -> None:
        """Let the job claim, and its shepherd be killed."""
        super().prepare()
        self.stage.must(self.node.hook(self.node.mine, "prolog"), 0)
        self.node.unlink(self.node.mine.pid)

    def proper(self) -> None:
        """Expect that it frees and closes what the dead hold."""
        super().proper()
        self.follows("it")

    def course(self, code: int) -> None:
        """Let the next reconcile come."""
        del code
        self.settled()


CASES = (
    Case("grouped prolog", GroupedProlog),
    Case("grouped epilog", GroupedEpilog),
    Case("grouped reap", GroupedReap),
)
