# SPDX-License-Identifier: Apache-2.0
"""The world can fail: each of these faults is planted, and found within so many schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import pytest

from gpulock.alloc import availability, claim, holders, reaper, shares
from gpulock.alloc import release as alloc_release
from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import DIED, Reaper, ReapOutcome
from gpulock.alloc.shares import CardPlaces
from gpulock.daemon.history import writer
from gpulock.node.procfs import Proc
from gpulock.store import atomic, boot, gate, grants, owed, repair
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner, encode_owner
from gpulock.store.repair import Repair
from gpulock.store.verdicts import DEAD, Verdict
from tests.world.casts import CASTS, LOST
from tests.world.choosers import Planned
from tests.world.explore import Explorer, WorldError
from tests.world.play import MOST, find_planted_fault
from tests.world.site import Site

if TYPE_CHECKING:
    from gpulock.alloc.reaper import ClaimEnd

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

    def make(store: LockStore, record: Owner) -> None:
        data = encode_owner(record).encode()
        grants.write_record_folder(store, record.token, data)
        for name in record.devices:
            os.makedirs(f"{store.locks_dir}/{name}", exist_ok=True)
            atomic.replace_file(f"{store.locks_dir}/{name}/owner", data)

    patch.setattr(grants, "make_claim", make)


def token_is_not_compared(patch: pytest.MonkeyPatch, site: Site) -> None:
    """What a look before the gate judged is freed, whoever has it by now."""
    ahead, finish, release = Reaper.judge_ahead, Reaper.finish, grants.release_devices
    stale: dict[str, Lock] = {}

    def looked(engine: Reaper, uids: Iterable[int] = ()) -> None:
        ahead(engine, uids)
        stale.update({name: lock for name, lock in engine.held.items() if lock.owner})
        engine._ahead = None  # pyright: ignore[reportPrivateUsage]

    def late(engine: Reaper, locks: list[Lock], over: ClaimEnd, how: str = "") -> list[ReapOutcome]:
        return finish(engine, [stale.get(lock.id, lock) for lock in locks], over, how)

    def whoever(
        store: LockStore, token: str, names: Collection[str], how: str, boot_id: str
    ) -> None:
        for name in names:
            now = store.read(name).owner
            release(store, now.token if now else token, [name], how, boot_id)

    def same(*_: object) -> bool:
        return True

    del site
    patch.setattr(alloc_release, "is_same_claim", same)
    patch.setattr(Reaper, "judge_ahead", looked)
    patch.setattr(Reaper, "finish", late)
    patch.setattr(grants, "release_devices", whoever)


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
    def nothing(*_: object) -> tuple[str, str]:
        return "", ""

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

    def nobody(*_: object) -> tuple[str, str]:
        return "", ""

    del site
    patch.setattr(Judge, "verdict", judged)
    patch.setattr(reaper, "remaining_device_user", nobody)


def line_is_not_looked_for_in_the_history(patch: pytest.MonkeyPatch, site: Site) -> None:
    def none(*_: object) -> set[str]:
        return set()

    del site
    patch.setattr(writer, "find_written_tokens", none)


def claim_is_not_owed_a_line(patch: pytest.MonkeyPatch, site: Site) -> None:
    def nothing(*_: object) -> None:
        return

    del site
    patch.setattr(owed, "note_owed_line", nothing)


def living_owner_counts_as_ended(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A reconcile frees what has no process left, whether its owner lives or not."""
    finish = Reaper.finish

    def late(engine: Reaper, locks: list[Lock], over: ClaimEnd, how: str = "") -> list[ReapOutcome]:
        return finish(engine, locks, reaper.ENDED if over == DIED else over, how)

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
    patch.setattr(holders, "lock_ids_overlap", same)
    patch.setattr(availability, "SHARE", "no part of a name")


def places_are_not_counted(patch: pytest.MonkeyPatch, site: Site) -> None:
    def all_of_them(card: CardPlaces, uid: int | None = None) -> int:
        del uid
        return card.places

    del site
    patch.setattr(shares, "count_free_places", all_of_them)


def users_are_not_compared(patch: pytest.MonkeyPatch, site: Site) -> None:
    count = shares.count_free_places

    def of_anybody(card: CardPlaces, uid: int | None = None) -> int:
        del uid
        return count(card)

    del site
    patch.setattr(shares, "count_free_places", of_anybody)


def share_joins_a_card_of_a_whole_job(patch: pytest.MonkeyPatch, site: Site) -> None:
    share_joins_a_card_that_is_held(patch, site)


def records_alone_do_not_count(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A lock that somebody removed is free, whatever its record says."""

    def nothing(*_: object) -> None:
        return

    def locked(store: LockStore, boot_id: str) -> Repair:
        done = whole(store, boot_id)
        done.held = {
            name: lock
            for name, lock in done.held.items()
            if os.path.isdir(f"{store.locks_dir}/{name}")
        }
        return done

    whole = repair.repair_locks
    del site
    patch.setattr(repair, "put_back_lock", nothing)
    patch.setattr(claim, "repair_locks", locked)


def lock_has_no_record(patch: pytest.MonkeyPatch, site: Site) -> None:
    def nothing(*_: object) -> None:
        return

    del site
    patch.setattr(grants, "write_record_folder", nothing)


def state_dir_has_the_boot_id_first(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A kill between the two boot ids closes the node."""
    begin = boot.begin_boot

    def early(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
        boot.write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
        begin(store, state_dir, boot_id, node)

    del site
    patch.setattr(boot, "begin_boot", early)


def lost_records_close_no_node(patch: pytest.MonkeyPatch, site: Site) -> None:
    """Where the folder of all records is gone, claims begin anew."""

    def never(state_dir: str, boot_id: str) -> bool:
        del state_dir, boot_id
        return False

    del site
    patch.setattr(boot, "may_be_claimed_boot", never)


def record_does_not_shrink(patch: pytest.MonkeyPatch, site: Site) -> None:
    """What is given back of a claim comes back with the next repair."""

    def nothing(store: LockStore, record: Owner) -> None:
        del store, record

    del site
    patch.setattr(grants, "rewrite_claim", nothing)


LOST_MUTANTS: tuple[tuple[Plant, str], ...] = (
    (records_alone_do_not_count, "lock_dir_and_a_later_job"),
    (lost_records_close_no_node, "both_folders"),
    (record_does_not_shrink, "part_and_lock_dir"),
)
MUTANTS: tuple[tuple[Plant, str], ...] = (
    (gate_is_not_locked, "commands"),
    (lock_is_taken_where_it_is, "two_jobs"),
    (token_is_not_compared, "shepherd_dies"),
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
    (share_joins_a_card_of_a_whole_job, "a_whole_job_and_a_share"),
    (lock_has_no_record, "two_jobs"),
    (state_dir_has_the_boot_id_first, "two_jobs"),
    (record_does_not_shrink, "release_of_a_part"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS])
def test_a_planted_fault_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str
) -> None:
    plant(monkeypatch, site)
    find_planted_fault(site, CASTS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name"), LOST_MUTANTS, ids=[one[0].__name__ for one in LOST_MUTANTS]
)
def test_a_planted_fault_about_what_is_lost_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str
) -> None:
    plant(monkeypatch, site)
    find_planted_fault(site, LOST[name])


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
    assert (
        "and its record of 0000:" in text or "has it, and now job" in text or " at the end" in text
    )
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
