# SPDX-License-Identifier: Apache-2.0
"""One simulated node of the fleet, in memory: jobs come and go, and a scrape is a look.

Book, collectors and text are the exporter's own. What differs from a real node: it looks when it
is asked and not every second, and nothing of its locks is on a disk.
"""

from __future__ import annotations

import itertools
import os
import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpulock_exporter.clock import Moment
from gpulock_exporter.metrics.devices import collect_families
from gpulock_exporter.metrics.exposition import render_exposition
from gpulock_exporter.simulated.card import SimulatedState
from gpulock_exporter.simulated.scene import Scene, SimulationScript
from gpulock_exporter.state.collector_state import CollectorState
from gpulock_exporter.state.local_state import LocalState
from gpulock_exporter.state.snapshot import ExporterHealth, SnapshotLimits
from gpulock_exporter.telemetry import Frame, Xid
from gpulock_exporter.web.negotiation import Format, RenderedMetrics

import gpulock
from gpulock.alloc.process_owner import ProcessTree
from gpulock.node import devices
from gpulock.node.procfs import Proc
from gpulock.simulate.node import write_simulated_node
from gpulock.store import atomic
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, Verdict

DRIVER = "580.159.03"
WIDTHS = (1, 1, 1, 1, 2, 2, 4, 8)  # GPUs of a job
MEAN_JOB, MEAN_PAUSE = 900.0, 200.0  # seconds that a job lasts, and between two of a node
BEFORE = 1800.0  # seconds for which the nodes have been at work when it begins
IDLE_SHARE, XID_SHARE = 0.1, 1e-4  # of the jobs; of the looks at a node
RECONCILED = 30.0  # seconds between two reconciles
USERS = 200
# a look is the scrape's, and nothing is held-idle in minutes by the real limits
LIMITS = SnapshotLimits(oldest=60.0, idle_after=120.0, gpus=8)
SERVICES = ("Xorg",)
COLLECTORS = ("utilization", "memory", "power", "temperature", "clocks", "gpm", "processes")


class Hardware(NamedTuple):
    """What all nodes have alike."""

    cards: list[devices.Device]
    inventory: dict[str, str]
    links: dict[tuple[str, str], int]


class Job(NamedTuple):
    """A job and when it ends, CLOCK_BOOTTIME seconds."""

    end: float
    places: tuple[str, ...]


@dataclass(frozen=True)
class Boot:
    """The machine that plays all nodes: its boot, and a process that stands for every job's."""

    boot_id: str
    pid: int
    session: int


def hardware(folder: Path, preset: str = "dgx-h200") -> Hardware:
    """Return the hardware of a simulated node, which is written below `folder`."""
    node = write_simulated_node(folder, preset)
    boot_id = boot().boot_id
    told = devices.read_nvml_inventory(str(node.lock_dir), boot_id)
    cards = devices.read_devices(str(node.driver_root), str(node.sys_root))
    return Hardware(cards, told, devices.nvlink_counts(told))


def boot() -> Boot:
    """Return this machine."""
    boot_id = atomic.read_text("/proc/sys/kernel/random/boot_id").strip()
    return Boot(boot_id, os.getpid(), os.getsid(0))


class FleetNode:
    """Node number `number`; `now` is when it begins. `numbers` gives job ids."""

    def __init__(
        self, number: int, here: Hardware, machine: Boot, numbers: itertools.count[int], now: float
    ) -> None:
        self._name = f"gpu{number:04d}"
        self._here, self._machine, self._numbers = here, machine, numbers
        self._random = random.Random(number)
        self._uuids = {
            card.bus: f"GPU-{uuid.UUID(int=self._random.getrandbits(128), version=4)}"
            for card in here.cards
        }
        self._locks: dict[str, Lock] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._idle: frozenset[str] = frozenset()
        self._jobs: list[Job] = []
        self._states = {card.bus: SimulatedState() for card in here.cards}
        self._claims = self._sequence = 0
        self._next = now - BEFORE + self._random.expovariate(1 / MEAN_PAUSE)
        self._last = now
        self._schedule(now)
        self._book = CollectorState(machine.boot_id, LIMITS, SERVICES, lambda: ProcessTree(Proc()))

    def look(self, now: Moment) -> RenderedMetrics:
        """Look once, and return what there is to be told."""
        self._schedule(now.boottime)
        facts = self._facts(now.boottime)
        self._book.tick([self._frame(now)], facts, now)
        health = ExporterHealth(version=gpulock.__version__)
        snapshot = self._book.freeze(self._here.cards, facts, now, health).snapshot()

        def text(form: Format) -> bytes:
            return render_exposition(collect_families(snapshot), form is Format.OPENMETRICS)

        return RenderedMetrics(text)

    def _frame(self, now: Moment) -> Frame:
        """Return what the driver of this node says."""
        here = self._here
        script = SimulationScript(idle=self._idle)
        scene = Scene(
            self._last, now.boottime, True, self._locks, script, here.inventory, here.links
        )
        self._last = now.boottime
        self._sequence += 1
        frame = Frame(self._sequence, now.boottime, now.wall, DRIVER)
        for card in here.cards:
            for record in scene.records(card, self._states[card.bus]):
                record.uuid = self._uuids[record.bus]
                frame.devices.append(record)
        if self._random.random() < XID_SHARE:
            frame.xids.append(Xid(self._random.choice(list(self._uuids.values())), 31))
        frame.durations = {name: self._random.uniform(1e-4, 2e-3) for name in COLLECTORS}
        return frame

    def _facts(self, now: float) -> LocalState:
        """Return what the files of gpulock would say."""
        return LocalState(
            locks=dict(self._locks),
            quarantined={},
            verdicts=dict(self._verdicts),
            reconciled=now - now % RECONCILED,
            counters={
                "claims_granted": str(self._claims),
                "claims_busy": "0",
                "lock_wait_seconds": f"{0.0002 * self._claims:.6f}",
                "reaped_process": "0",
            },
            durations=dict.fromkeys(("locks", "quarantine", "verdicts", "counters"), 0.0003),
        )

    def _schedule(self, now: float) -> None:
        """Let jobs begin and end until now; one that finds too few GPUs free goes elsewhere."""
        while self._next <= now:
            at = self._next
            self._next += self._random.expovariate(1 / MEAN_PAUSE)
            self._end(at)
            free = [card.bus for card in self._here.cards if card.bus not in self._locks]
            wanted = self._random.choice(WIDTHS)
            if wanted <= len(free):
                self._begin(tuple(free[:wanted]), at)
        self._end(now)

    def _begin(self, places: tuple[str, ...], at: float) -> None:
        self._claims += 1
        token = f"{self._random.getrandbits(64):016x}"
        job_id = str(next(self._numbers))
        uid = self._random.randrange(USERS)
        for place in places:
            record = Owner(
                scheduler="slurm" if uid % 2 else "sge",
                cluster="fleet",
                node=self._name,
                job_id=job_id,
                task_id="",
                user=f"user{uid:03d}",
                uid=20_000 + uid,
                queue="gpu.q",
                boot_id=self._machine.boot_id,
                pid=self._machine.pid,
                sid=self._machine.session,
                claimed_boottime=at,
                token=token,
                devices=places,
                uuid=self._uuids[place],
            )
            self._locks[place] = Lock(place, record, "")
        self._verdicts[token] = Verdict(ALIVE, "its processes are there")
        if self._random.random() < IDLE_SHARE:
            self._idle |= set(places)
        self._jobs.append(Job(at + self._random.expovariate(1 / MEAN_JOB), places))

    def _end(self, now: float) -> None:
        for job in [one for one in self._jobs if one.end <= now]:
            self._jobs.remove(job)
            self._idle -= set(job.places)
            for place in job.places:
                record = self._locks.pop(place).owner
                if record is not None:
                    self._verdicts.pop(record.token, None)
