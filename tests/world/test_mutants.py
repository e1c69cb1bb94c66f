# SPDX-License-Identifier: Apache-2.0
"""The world can fail: each of these faults is planted, and found within so many schedules."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from gpulock.alloc import availability, reaper, shares
from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import DIED, Reaper, ReapOutcome
from gpulock.daemon.history import files
from gpulock.node import devices
from gpulock.node.procfs import Proc
from gpulock.store import atomic, claim_records, gate
from gpulock.store.locks import Lock, LockStore
from gpulock.store.verdicts import DEAD, Verdict
from tests.world.casts import CASTS
from tests.world.choosers import Planned
from tests.world.explore import Explorer, WorldError
from tests.world.play import MOST, find_planted_fault
from tests.world.site import Site

Plant = Callable[[pytest.MonkeyPatch, Site], None]


def gate_is_not_locked(patch: pytest.MonkeyPatch, site: Site) -> None:
    class Open:
        """fcntl, which locks nothing."""

        LOCK_EX = LOCK_NB = LOCK_UN = 0

        @staticmethod
        def flock(fd: int, how: int) -> None:
            del fd, how
            site.kernel.step("flock", "not at all")

    patch.setattr(gate, "fcntl", Open)


def lock_is_taken_where_it_is(patch: pytest.MonkeyPatch, site: Site) -> None:
    """mkdir accepts the folder of another claim; the gate is not asked either."""
    gate_is_not_locked(patch, site)

    def make(store: LockStore, name: str, text: str) -> None:
        os.makedirs(f"{store.path}/locks/{name}", exist_ok=True)
        atomic.replace_file(f"{store.path}/locks/{name}/owner", text.encode())

    patch.setattr(LockStore, "make_text", make)


def token_is_not_compared(patch: pytest.MonkeyPatch, site: Site) -> None:
    def has_token(store: LockStore, name: str, token: str | None) -> bool:
        del store, name
        return token is not None

    del site
    patch.setattr(LockStore, "has_token", has_token)


def start_time_is_ignored(patch: pytest.MonkeyPatch, site: Site) -> None:
    def running(proc: Proc, pid: int, start: int) -> bool:
        del start
        try:
            return bool(proc.stat(pid))
        except ProcessLookupError:
            return False

    del site
    patch.setattr(Proc, "running", running)


def what_is_left_of_a_job_is_not_looked_for(patch: pytest.MonkeyPatch, site: Site) -> None:
    def nothing(*_: object) -> str:
        return ""

    def nobody(*_: object) -> JobProcesses:
        return JobProcesses()

    del site
    patch.setattr(Judge, "job_processes", nobody)
    patch.setattr(reaper, "remaining_device_user", nothing)


def dead_is_who_has_no_shepherd(patch: pytest.MonkeyPatch, site: Site) -> None:
    verdict = Judge.verdict

    def judged(judge: Judge, lock: Lock) -> Verdict:
        found = verdict(judge, lock)
        return found if "its shepherd" in found.proof else Verdict(DEAD, "it has no shepherd")

    def nobody(*_: object) -> str:
        return ""

    del site
    patch.setattr(Judge, "verdict", judged)
    patch.setattr(reaper, "remaining_device_user", nobody)


def line_is_not_looked_for_in_the_history(patch: pytest.MonkeyPatch, site: Site) -> None:
    def none(*_: object) -> set[str]:
        return set()

    del site
    patch.setattr(files, "find_written_tokens", none)


def claim_is_not_owed_a_line(patch: pytest.MonkeyPatch, site: Site) -> None:
    def nothing(*_: object) -> None:
        return

    del site
    patch.setattr(claim_records, "record_pending_history", nothing)


def living_owner_counts_as_ended(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A reconcile frees what has no process left, whether its owner lives or not."""
    finish = Reaper.finish

    def late(engine: Reaper, lock: Lock, over: str, how: str = "") -> ReapOutcome:
        return finish(engine, lock, reaper.ENDED if over == DIED else over, how)

    del site
    patch.setattr(Reaper, "finish", late)


def share_joins_a_card_that_is_held(patch: pytest.MonkeyPatch, site: Site) -> None:
    def none(held: dict[str, Lock]) -> dict[str, Lock]:
        del held
        return {}

    del site
    patch.setattr(availability, "whole_claims", none)


def card_is_granted_beside_its_shares(patch: pytest.MonkeyPatch, site: Site) -> None:
    def same(a: str, b: str) -> bool:
        return a == b

    del site
    patch.setattr(devices, "lock_ids_overlap", same)


def places_are_not_counted(patch: pytest.MonkeyPatch, site: Site) -> None:
    def all_of_them(card: str, places: int, held: dict[str, Lock], uid: int | None = None) -> int:
        del card, held, uid
        return places

    del site
    patch.setattr(shares, "count_free_places", all_of_them)


def users_are_not_compared(patch: pytest.MonkeyPatch, site: Site) -> None:
    count = shares.count_free_places

    def of_anybody(card: str, places: int, held: dict[str, Lock], uid: int | None = None) -> int:
        del uid
        return count(card, places, held)

    del site
    patch.setattr(shares, "count_free_places", of_anybody)


def share_joins_a_card_of_a_whole_job(patch: pytest.MonkeyPatch, site: Site) -> None:
    share_joins_a_card_that_is_held(patch, site)


MUTANTS: tuple[tuple[Plant, str], ...] = (
    (gate_is_not_locked, "commands"),
    (lock_is_taken_where_it_is, "two_jobs"),
    (token_is_not_compared, "commands"),
    (start_time_is_ignored, "pid_is_reused"),
    (what_is_left_of_a_job_is_not_looked_for, "straggler"),
    (dead_is_who_has_no_shepherd, "commands"),
    (line_is_not_looked_for_in_the_history, "gpulockd_and_reap"),
    (claim_is_not_owed_a_line, "reboot"),
    (living_owner_counts_as_ended, "straggler"),
    (share_joins_a_card_that_is_held, "slurm_shards_and_a_card"),
    (card_is_granted_beside_its_shares, "slurm_shards_and_a_card"),
    (places_are_not_counted, "sge_shares"),
    (users_are_not_compared, "shares_of_two_users"),
    (share_joins_a_card_of_a_whole_job, "sge_shares_and_cards"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS])
def test_a_planted_fault_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str
) -> None:
    plant(monkeypatch, site)
    find_planted_fault(site, CASTS[name])


@pytest.mark.slow
def test_a_failure_is_told_by_its_shortest_schedule(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_is_taken_where_it_is(monkeypatch, site)
    explorer = Explorer(site, CASTS["two_jobs"])
    with pytest.raises(WorldError) as caught:
        for seed in range(1, MOST):
            explorer.sample(seed)
    text = str(caught.value)
    assert "and its lock of 0000:" in text or "has it, and now job" in text
    assert text.count("\n") < 150
    assert len(explorer.plan) <= 4


def test_a_seed_is_played_again_call_for_call(site: Site) -> None:
    explorer = Explorer(site, CASTS["straggler"])
    traces: list[list[list[str]]] = []
    for seed in (5, 6, 5):
        explorer.sample(seed)
        traces.append([list(line) for line in site.kernel.trace])
    assert traces[0] == traces[2] != traces[1]


def test_the_choices_of_a_schedule_play_it_again(site: Site) -> None:
    explorer = Explorer(site, CASTS["slurm_straggler"])
    explorer.sample(12)
    trace, plan = [list(line) for line in site.kernel.trace], dict(site.kernel.made)
    assert explorer.play(Planned(plan), 12) == ""
    assert site.kernel.trace == trace
