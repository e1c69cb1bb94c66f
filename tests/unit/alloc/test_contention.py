# SPDX-License-Identifier: Apache-2.0
"""Many processes want few devices: nothing is granted twice, nothing is lost, nobody starves.

What the workers hold is judged by a log of their own, never by gpulock's records: `take` is
written after a claim, `give` before the release, each in one append with a monotonic stamp.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.release import ReleaseResult, release_locks
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.node.settings_file import read_settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.simulate.node import write_simulated_node
from gpulock.store import grants
from gpulock.store.event_log import count_events, read_events
from gpulock.store.locks import RELEASED, LockStore
from gpulock.workstation.process_claims import make_process_owner
from tests.support.scene import folder, linked_proc
from tests.support.wait import let_work

pytestmark = pytest.mark.slow

GPUS, MOST, WORKERS = 8, 4, 64
PLACES = 6  # locks more than GPUs: three of them have 10 places, and one is spare
BOLD = 0.02  # how often a worker asks although it sees that too few are free
GIANT = pytest.mark.giant
SOAK = [pytest.mark.soak, pytest.mark.timeout(600)]
FORK = get_context("fork")


class Field:
    """A node of 8 devices, a /proc with the workers alone, and the log."""

    def __init__(self, root: Path) -> None:
        self.proc = linked_proc(root / "proc", (os.getpid(),))
        self.config = write_simulated_node(root / "node", "dgx1").config
        with self.config.open("a") as file:
            file.write(f"PROC_ROOT={self.proc}\n")
        self.log = root / "log"
        self.node = Node(read_settings(str(self.config)))
        self._crowd: list[BaseProcess] = []

    def clear(self) -> None:
        """End every worker that is left."""
        for process in self._crowd:
            process.kill()
            process.join()

    def show(self, pid: int) -> None:
        """Let a process be seen by every judge."""
        (self.proc / str(pid)).symlink_to(f"/proc/{pid}")

    def hide(self, pid: int) -> None:
        """Take away the link of a process that is over."""
        (self.proc / str(pid)).unlink(missing_ok=True)

    def note(self, event: str, what: list[str]) -> None:
        """Append to the log: one line a device, in one write."""
        stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        lines = "".join(f"{stamp} {event} {os.getpid()} {name}\n" for name in what)
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, lines.encode())
        os.close(fd)

    def events(self) -> list[tuple[int, str, int, str]]:
        """Return the log in order of time."""
        lines = [line.split(" ") for line in self.log.read_text().splitlines()]
        return sorted((int(when), event, int(pid), name) for when, event, pid, name in lines)

    def claim(self, count: int, share: bool = False) -> Grant:
        """Claim for this process."""
        node = self.node
        own = make_process_owner(node, os.getpid(), "worker")
        want = ClaimRequest(count, share=share)
        return claim_devices(node, own, want, lambda: make_liveness_judge(node), Deadline(60))

    def release(self, token: str) -> ReleaseResult:
        """Release one claim."""
        node = self.node
        return release_locks(
            node, lambda o: o.token == token, make_liveness_judge(node), Deadline(60), "test"
        )

    def work(self, seed: int, claims: int) -> None:
        """Claim, log, log, release, so many times; a worker's whole life.

        Its link in the simulated /proc goes with it: one that leads nowhere would be to every look
        a process that is just ending.
        """
        luck = random.Random(seed)
        try:
            for _ in range(claims):
                grant = self.insist(luck.randint(1, MOST), luck, bool(luck.randrange(3)))
                ids = [device.id for device in grant.devices]
                self.note("take", ids)
                self.note("give", ids)
                released = self.release(grant.owner.token)
                self.hide(os.getpid())
                left = [name for name, _ in released.kept]
                assert sorted([*released.freed, *left]) == sorted(ids)
        finally:
            self.hide(os.getpid())

    def insist(self, count: int, luck: random.Random, share: bool = False) -> Grant:
        """Claim until it is granted, and be seen by every judge from before the claim on.

        With `share` it is places, where the node has some. A refused claim looks at all processes:
        so peek first, and be seen only when at it.
        """
        while True:
            share = share and bool(self.node.settings.shares)
            most = GPUS + PLACES if self.node.settings.shares else GPUS
            if len(os.listdir(self.node.store.locks_dir)) + count <= most or luck.random() < BOLD:
                self.show(os.getpid())
                try:
                    return self.claim(count, share=share)
                except Refusal as refusal:
                    self.hide(os.getpid())
                    if refusal.kind != BUSY:
                        raise
            let_work(luck.uniform(0.01, 0.05))

    def start(self, seed: int, claims: int) -> BaseProcess:
        """Start a worker."""
        process = FORK.Process(target=self.work, args=(seed, claims))
        process.start()
        self._crowd.append(process)
        return process


@pytest.fixture
def field() -> Iterator[Field]:
    with folder("contention") as root:
        made = Field(root)
        yield made
        made.clear()


def held_twice(events: list[tuple[int, str, int, str]]) -> list[str]:
    """Return where the log shows two holders of a device; `dead` ends all that a process held.

    `dead` is stamped before the kill. The process may still take and give for some microseconds
    afterwards: what it takes must be free, but nobody is told when it let it go.
    """
    holder: dict[str, int] = {}
    ended: set[int] = set()
    wrong: list[str] = []
    for when, event, pid, name in events:
        if event == "take":
            if name in holder:
                wrong.append(f"{when}: {pid} takes {name}, {holder[name]} has it")
            if pid not in ended:
                holder[name] = pid
        elif event == "give":
            if pid not in ended and holder.pop(name, None) != pid:
                wrong.append(f"{when}: {pid} gives {name}, which it has not")
        else:
            ended.add(pid)
            holder = {device: other for device, other in holder.items() if other != pid}
    return wrong


def test_the_judge_of_the_log_knows_that_a_killed_process_holds_nothing() -> None:
    took_when_killed = [(1, "dead", 7, "-"), (2, "take", 7, "a"), (3, "take", 8, "a")]
    gave_when_killed = [(1, "take", 7, "a"), (2, "dead", 7, "-"), (3, "give", 7, "a")]
    took_of_another = [(1, "take", 8, "a"), (2, "dead", 7, "-"), (3, "take", 7, "a")]

    assert held_twice(took_when_killed) == []
    assert held_twice(gave_when_killed) == []
    assert held_twice(took_of_another) == ["3: 7 takes a, 8 has it"]


def ended_holds(store: LockStore) -> list[str]:
    """Return a line for each device that a claim let go."""
    paths = Path(store.finished_dir).glob(f"*/{RELEASED}")
    return [line for path in paths for line in path.read_text().split("\n") if line]


def places_beyond(events: list[tuple[int, str, int, str]], places: dict[str, int]) -> list[str]:
    """Return where the log shows more places of a card held than it has, or one beside its card."""
    held: set[str] = set()
    wrong: list[str] = []
    for when, event, pid, name in events:
        if event == "take":
            held.add(name)
        elif event == "give":
            held.discard(name)
        card = name.partition(SHARE)[0]
        taken = [one for one in held if one.startswith(f"{card}{SHARE}")]
        if len(taken) > places.get(card, 0) or (taken and card in held):
            wrong.append(f"{when}: {pid} {event}s {name}, and there are {' '.join(taken)}")
    return wrong


def test_more_places_than_there_are_and_a_card_beside_its_places_are_found() -> None:
    two = [(1, "take", 7, "a.share1"), (2, "take", 8, "a.share2")]
    assert places_beyond(two, {"a": 2}) == []
    assert len(places_beyond(two, {"a": 1})) == 1
    assert len(places_beyond([(1, "take", 7, "a.share1"), (2, "take", 8, "a")], {"a": 2})) == 1


SHARES = "5:4 6:4 7:2"


@pytest.mark.parametrize(
    ("shares", "claims"),
    [
        *[("", 3), pytest.param("", 16, marks=GIANT), pytest.param("", 157, marks=SOAK)],
        *[(SHARES, 2), pytest.param(SHARES, 6, marks=GIANT), pytest.param(SHARES, 60, marks=SOAK)],
    ],
)
def test_64_processes_contend_for_8_devices(
    field: Field, monkeypatch: pytest.MonkeyPatch, shares: str, claims: int
) -> None:
    monkeypatch.setattr(grants, "FINISHED_CAP", WORKERS * claims + 2)  # each claim keeps its end
    with field.config.open("a") as file:
        file.write(f"SHARES={shares}\n")
    field.node = Node(read_settings(str(field.config)))
    field.release(field.claim(1).owner.token)  # the first claim of a boot makes ready
    crowd = [field.start(seed, claims) for seed in range(WORKERS)]
    for process in crowd:
        process.join()

    assert [process.exitcode for process in crowd] == [0] * WORKERS  # so nobody starved
    events = field.events()
    cards = [card.id for card in field.node.devices()]
    places = {
        cards[int(card)]: int(count)
        for card, _, count in [word.partition(":") for word in shares.split()]
    }
    assert held_twice(events) == places_beyond(events, places) == []
    taken = defaultdict[int, set[int]](set)
    names: set[str] = set()
    for when, event, pid, name in events:
        if event == "take":
            taken[pid].add(when)
            names.add(name)
    assert [len(stamps) for stamps in taken.values()] == [claims] * WORKERS
    assert {*cards} & names
    assert any(SHARE in name for name in names) is bool(shares)
    reconcile_locks(field.node, make_liveness_judge(field.node), Deadline(20))
    assert field.node.store.read_all_locks() == {}
    totals = count_events(read_events(field.node.store.path))
    assert totals["claims_granted"] == WORKERS * claims + 1
    # What a release keeps while processes come and go, a later claim or reconcile frees: of a
    # worker that is gone, or of one that claims again.
    reaped = {name for name in totals if name.startswith("reaped_")}
    assert reaped <= {"reaped_process", "reaped_released"}
    assert len(ended_holds(field.node.store)) == len([e for e in events if e[1] == "take"]) + 1
    assert len(field.claim(GPUS).devices) == GPUS


def kill_at_random(field: Field, workers: int, kills: int, luck: random.Random) -> None:
    """Keep a crowd at work and kill one after the other; the log says when each was killed."""
    seeds = itertools.count()
    crowd = [field.start(next(seeds), 1 << 30) for _ in range(workers)]
    for _ in range(kills):
        let_work(luck.uniform(0.0, 0.02))
        number = luck.randrange(workers)
        victim = crowd[number]
        bury(field, victim)
        crowd[number] = field.start(next(seeds), 1 << 30)
    for process in crowd:
        bury(field, process)


def bury(field: Field, victim: BaseProcess) -> None:
    """Kill a worker, noting its death before it can come: nobody may have its devices earlier."""
    assert victim.pid is not None
    stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    with field.log.open("a") as file:
        file.write(f"{stamp} dead {victim.pid} -\n")
    field.hide(victim.pid)


@pytest.mark.parametrize(
    ("workers", "kills"),
    [(16, 30), pytest.param(16, 150, marks=GIANT), pytest.param(24, 3000, marks=SOAK)],
)
def test_claims_of_killed_processes_are_reaped_by_others(
    field: Field, workers: int, kills: int
) -> None:
    field.release(field.claim(1).owner.token)
    kill_at_random(field, workers, kills, random.Random(kills))

    events = field.events()
    killed = {pid for _, event, pid, _ in events if event == "dead"}
    assert len(killed) == kills + workers
    assert held_twice(events) == []
    reconcile_locks(field.node, make_liveness_judge(field.node), Deadline(20))
    assert field.node.store.read_all_locks() == {}
    assert len(field.claim(GPUS).devices) == GPUS
