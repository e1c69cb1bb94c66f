# SPDX-License-Identifier: Apache-2.0
"""gpulockd and a prolog meet at one stale lock: one frees it, the job gets it, nobody else does."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.reaper import FREED
from gpulock.daemon.history.pending import find_ended_claims
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.simulate.node import write_simulated_node
from gpulock.store.event_log import count_events, read_events
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import make_process_owner
from tests.support.locks import place_lock
from tests.support.pairs import zip_equal
from tests.support.scene import folder, linked_proc

FORK = get_context("fork")
GONE = 1 << 22  # no pid is so large
LOCKS = 2
ROUNDS = [
    pytest.param(60, id="short"),
    pytest.param(1000, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
]
Act = Callable[[Node], list[str]]


def reap(node: Node) -> list[str]:
    """Reconcile; return what was freed."""
    report = reconcile_locks(node, make_liveness_judge(node), Deadline(20))
    return [outcome.lock.id for outcome in report.outcomes if outcome.act == FREED]


def take(node: Node) -> list[str]:
    """Claim all that there is, as a prolog does; return what was granted."""
    count = len(node.devices())
    record = make_process_owner(node, os.getpid(), "prolog")
    return [
        d.id
        for d in claim_devices(
            node, record, ClaimRequest(count), lambda: make_liveness_judge(node), Deadline(20)
        ).devices
    ]


def work(config: str, act: Act, orders: Connection) -> None:
    """Act whenever it is ordered; send back what came of it."""
    node = Node(read_settings(config))
    while orders.recv():
        orders.send(act(node))


class Rivals:
    """Two processes that act at the same moment on one node."""

    def __init__(self, root: Path) -> None:
        self.proc = linked_proc(root / "proc", (os.getpid(),))
        self.simulated = write_simulated_node(root / "node", "dgx1", 2)
        with self.simulated.config.open("a") as file:
            file.write(f"PROC_ROOT={self.proc}\n")
        self.config = str(self.simulated.config)
        self.node = Node(read_settings(self.config))
        reap(self.node)
        self.ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for act in (reap, take):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=work, args=(self.config, act, theirs))
            process.start()
            (self.proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
            self.ends.append(ours)
            self.processes.append(process)

    def stale(self, number: int) -> Owner:
        """Let a dead owner hold everything."""
        ids = tuple(device.id for device in self.node.devices())
        one = make_process_owner(self.node, os.getpid(), "alice").copy(
            pid=GONE, job_id=str(GONE), sid=0, token=f"dead{number}", devices=ids
        )
        for device in ids:
            place_lock(self.node.store, device, one)
        return one

    def race(self, first: int) -> tuple[list[str], list[str]]:
        """Let both act at once; return what was reaped, and what was granted."""
        for end in (self.ends[first], self.ends[1 - first]):
            end.send(True)
        return self.ends[0].recv(), self.ends[1].recv()

    def clear(self) -> None:
        """Take all locks away."""
        store = self.node.store
        for name in (store.locks_dir, store.claims_dir, store.finished_dir):
            shutil.rmtree(name)
            os.mkdir(name)

    def end(self) -> None:
        """End both."""
        for end, process in zip_equal(self.ends, self.processes):
            end.send(False)
            process.join()


@pytest.fixture
def rivals() -> Iterator[Rivals]:
    with folder("race") as root:
        made = Rivals(root)
        yield made
        made.end()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ROUNDS)
def test_of_gpulockd_and_a_prolog_one_frees_a_stale_lock(rivals: Rivals, rounds: int) -> None:
    node = rivals.node
    reaped = 0
    for number in range(rounds):
        stale = rivals.stale(number)
        freed, granted = rivals.race(number % 2)
        assert sorted(granted) == sorted(stale.devices)
        assert sorted(freed) in ([], sorted(stale.devices))
        reaped += bool(freed)
        held = {lock.owner.token for lock in node.store.read_all_locks().values() if lock.owner}
        assert len(held) == 1 and stale.token not in held
        claims = find_ended_claims(node, held, set(), time.time())
        assert claims.keys() == {stale.token}
        assert sorted(one.device for one in claims[stale.token]) == sorted(stale.devices)
        assert all(one.how.startswith("reap: ") for one in claims[stale.token])
        rivals.clear()
    counted = count_events(read_events(node.store.path))
    assert counted["claims_granted"] == rounds
    assert sum(v for k, v in counted.items() if k.startswith("reaped")) == LOCKS * rounds
    print(f"gpulockd was faster {reaped} times of {rounds}")
