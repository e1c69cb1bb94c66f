# SPDX-License-Identifier: Apache-2.0
"""With LEFTOVER_PROCESSES, what frees a device whose memory was not given back is stopped.

Of the job's two devices one is dirty, as the exporter's sample tells. Whatever was stopped, nobody
gets it afterwards: it is locked, or out of service. Only where the sample could not be read the
look at open files decides, and then the record of the release says so.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from gpulock.alloc.memory_check import MEMORY_NOT_REPORTED, MIB
from gpulock.deadline import clock_boottime
from gpulock.node import sample
from gpulock.store import quarantine
from tests.sweep.play import Case
from tests.sweep.sge import Epilog, Reap, SgePlay, SgeStage
from tests.sweep.stage import GONE, MINE

LATER = 3600.0  # seconds: a look newer than all that happens
DIRTY = 812  # MiB


class CleanStage(SgeStage):
    """The stage of Grid Engine, on which an exporter tells the devices' memory."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.configure(LEFTOVER_PROCESSES="kill", MAX_SAMPLE_AGE="600")
        self.dirty = ""  # the device whose memory stays in use

    def reset(self) -> None:
        """Bring back the files, and a sample that is new."""
        super().reset()
        self.tell()

    def tell(self) -> None:
        """Let the exporter have looked."""
        now = clock_boottime()
        head = [sample.SAMPLE_LINE, f"boot_id={self.node.boot_id}", f"boottime={now}"]
        lines = [
            f"device {device.id} looked={now + LATER} listed={now + LATER} processes=0"
            f" memory_used={DIRTY * MIB if device.id == self.dirty else 0}"
            for device in self.node.devices()
        ]
        folder = Path(self.node.settings.exporter_dir)
        folder.mkdir(exist_ok=True)
        (folder / sample.SAMPLE).write_text(
            "\n".join([*head, f"wall={time.time()}", *lines]) + "\n"
        )

    def out(self) -> list[str]:
        """Return the devices that are out of service."""
        return quarantine.list_noted_devices(self.node.settings.state_dir, quarantine.QUARANTINE)

    def untold(self, device: str) -> bool:
        """Return whether a device was freed by a process that did not know its memory."""
        notes = Path(self.node.store.released_dir).glob(f"*.{device}/released")
        return any(MEMORY_NOT_REPORTED in note.read_text() for note in notes)


class Dirty(SgePlay):
    """What every case expects: the dirty device goes to nobody."""

    sets = CleanStage
    node: CleanStage
    whose = MINE

    def prepare(self) -> None:
        """Let one device of the job's stay dirty."""
        super().prepare()
        self.node.dirty = min(self.stage.locks(self.whose))
        self.node.tell()

    def guarded(self, after: str) -> None:
        """Expect the dirty device locked, out of service, or freed by one who was told nothing."""
        dirty = self.node.dirty
        kept = dirty in self.stage.locks() or dirty in self.node.out() or self.node.untold(dirty)
        self.expect(kept, f"after {after} the dirty device is free")
        others = set(self.node.out()) - {dirty}
        self.expect(not others, f"after {after} clean devices are out of service: {others}")

    def settled(self) -> None:
        """Expect that one reconcile frees all, and that the next claim gets clean devices alone."""
        self.guarded("the fault")
        self.stage.reconcile()
        self.unharmed("the reconcile")
        self.guarded("the reconcile")
        left = sorted(set(self.stage.locks()) - set(self.others))
        self.expect(not left, f"still locked after a reconcile: {left}")
        out = self.node.out()
        rest = len(self.node.node.devices()) - len(self.others) - len(out)
        granted = {device.id for device in self.stage.claim_rest(rest).devices}
        self.expect(not granted & {*self.others, *out}, f"granted all the same: {granted}")
        self.unharmed("the next claim")


class DirtyEpilog(Dirty, Epilog):
    """The epilog is stopped."""

    def proper(self) -> None:
        """Expect that it frees both devices, and puts the dirty one away."""
        super().proper()
        self.expect(self.node.out() == [self.node.dirty], "undisturbed, it puts nothing away")


class DirtyReap(Dirty, Reap):
    """The reconcile is stopped that frees what a dead job held."""

    whose = GONE

    def proper(self) -> None:
        """Expect that it frees all, and puts the dirty device away."""
        super().proper()
        self.expect(self.node.out() == [self.node.dirty], "undisturbed, it puts nothing away")


CASES = (
    Case("epilog, dirty", DirtyEpilog),
    Case("reap, dirty", partial(DirtyReap, gone=2)),
)
