# SPDX-License-Identifier: Apache-2.0
"""The world can fail: each of these faults is planted, and found within so many schedules."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import pytest

from gpulock.alloc import availability, choose, claim, kinds, reaper, shares
from gpulock.alloc import release as alloc_release
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import DIED, Reaper, ReapOutcome
from gpulock.alloc.shares import CardPlaces
from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.history import writer
from gpulock.node.devices import Device
from gpulock.node.kinds import MIG, is_of_kind
from gpulock.node.procfs import Proc
from gpulock.store import atomic, boot, gate, grants, repair, restore
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner, encode_owner
from gpulock.store.verdicts import DEAD, Verdict
from tests.support.faults import returning
from tests.world.accidents import lock_dir_lost
from tests.world.actors import Cast, gpulockd
from tests.world.casts import CASTS, LOST, SGE
from tests.world.choosers import Planned
from tests.world.counts import SCHEDULES
from tests.world.explore import Explorer, WorldError
from tests.world.health import HEALTH_CASTS, HealthSite
from tests.world.kernel import Chooser
from tests.world.kinds import KIND_CASTS, KindSite
from tests.world.site import Site

if TYPE_CHECKING:
    from gpulock.alloc.reaper import ClaimEnd

MOST = 300  # schedules until a planted fault is found
FAILED = ("a program failed", "an actor failed")  # what was planted is broken itself
JUDGE_AHEAD, FINISH, RELEASE = Reaper.scan_before_gate, Reaper.finish, grants.release_devices
VERDICT, REPAIR, BEGIN = Judge.verdict, repair.repair_locks, boot.begin_boot
COUNT_FREE = shares.count_free_places
STALE: dict[str, Lock] = {}


class OpenGate:
    """fcntl, which locks nothing; to ask it is a step."""

    LOCK_EX = LOCK_NB = LOCK_UN = 0

    def __init__(self, site: Site) -> None:
        self._site = site

    def flock(self, fd: int, how: int) -> None:
        """Pass."""
        del fd, how
        self._site.kernel.step("flock", "not at all")


def take_locks_where_they_are(store: LockStore, record: Owner) -> None:
    """Make a claim; the folder of another one is accepted."""
    grants.write_record_folder(store, record.token, encode_owner(record).encode())
    for name in record.devices:
        os.makedirs(f"{store.locks_dir}/{name}", exist_ok=True)
        atomic.replace_file(f"{store.locks_dir}/{name}/owner", encode_owner(record).encode())


def keep_what_was_judged(engine: Reaper, uids: Collection[int] = ()) -> None:
    """Look before the gate, and go by that for good."""
    JUDGE_AHEAD(engine, uids)
    STALE.update({name: lock for name, lock in engine.held.items() if lock.owner})
    engine._ahead = None  # pyright: ignore[reportPrivateUsage]


def finish_stale(
    engine: Reaper, locks: list[Lock], over: ClaimEnd = DIED, how: str = ""
) -> list[ReapOutcome]:
    """Free what a look before the gate judged."""
    return FINISH(engine, [STALE.get(lock.id, lock) for lock in locks], over, how)


def finish_living(
    engine: Reaper, locks: list[Lock], over: ClaimEnd = DIED, how: str = ""
) -> list[ReapOutcome]:
    """Free what has no process left, whether its owner lives or not."""
    return FINISH(engine, locks, reaper.ENDED if over == DIED else over, how)


def release_whoever(
    store: LockStore, token: str, names: Collection[str], how: str, boot_id: str
) -> None:
    """Release devices, whoever has them by now."""
    for name in names:
        now = store.read(name).owner
        RELEASE(store, now.token if now else token, [name], how, boot_id)


def runs_whenever_it_began(proc: Proc, pid: int, start: int) -> bool:
    """Return whether a process has this number."""
    del start
    try:
        return bool(proc.stat(pid))
    except ProcessLookupError:
        return False


def judge_by_shepherd(judge: Judge, lock: Lock) -> Verdict:
    """Return the verdict; who has no shepherd is dead."""
    found = VERDICT(judge, lock)
    return found if "its shepherd" in found.proof else Verdict(DEAD, "it has no shepherd")


def count_all_places(card: CardPlaces, uid: int | None = None) -> int:
    """Return all places, held or not."""
    del uid
    return card.places


def count_for_anybody(card: CardPlaces, uid: int | None = None) -> int:
    """Return the free places, whoever has the others."""
    del uid
    return COUNT_FREE(card)


def repair_by_locks(store: LockStore, boot_id: str) -> dict[str, Lock]:
    """Repair; a lock that somebody removed is free, whatever its record says."""
    held = REPAIR(store, boot_id)
    return {name: held[name] for name in held if os.path.isdir(f"{store.locks_dir}/{name}")}


def begin_with_state(store: LockStore, state_dir: str, boot_id: str, node: str) -> None:
    """Begin a boot, STATE_DIR's id first: a kill between the two closes the node."""
    boot.write_boot_id(f"{state_dir}/boot_id", boot_id.encode() + b"\n")
    BEGIN(store, state_dir, boot_id, node)


def any_part(device: Device, kind: str) -> bool:
    """Return whether a device is of a kind; an instance is its card."""
    card = Device(device.bus, device.index)
    card.model = device.model
    return is_of_kind(device if kind.startswith(MIG) else card, kind)


def one_group(fit: list[Device]) -> list[list[Device]]:
    """Return cards of all models together."""
    return [fit]


def choose_twice(free: list[Device], want: ClaimRequest, *_: object) -> list[Device]:
    """Choose for each kind of a request by itself."""
    chosen = [
        device
        for kind, count in want.kinds
        for device in [d for d in free if is_of_kind(d, kind)][:count]
    ]
    return [device for device in free if device in chosen]


OPEN = (gate, "fcntl", OpenGate)  # of this world
NOBODY = (reaper, "remaining_device_user", returning(("", "")))
# What is another's, under which name, and what stands there instead.
FAULTS: dict[str, tuple[tuple[object, str, object], ...]] = {
    "gate_is_not_locked": (OPEN,),
    "lock_is_taken_where_it_is": (OPEN, (grants, "make_claim", take_locks_where_they_are)),
    "token_is_not_compared": (
        (alloc_release, "is_same_claim", returning(True)),
        (Reaper, "scan_before_gate", keep_what_was_judged),
        (Reaper, "finish", finish_stale),
        (grants, "release_devices", release_whoever),
    ),
    "start_time_is_ignored": ((Proc, "running", runs_whenever_it_began),),
    "what_is_left_of_a_job_is_not_looked_for": (
        (Judge, "job_processes", returning(JobProcesses())),
        NOBODY,
    ),
    "dead_is_who_has_no_shepherd": ((Judge, "verdict", judge_by_shepherd), NOBODY),
    "line_is_not_looked_for_in_the_history": ((writer, "find_written_tokens", returning(set())),),
    "claim_is_not_owed_a_line": ((grants, "note_owed_line", returning(None)),),
    "living_owner_counts_as_ended": ((Reaper, "finish", finish_living),),
    "share_joins_a_card_that_is_held": ((availability, "whole_claims", returning({})),),
    "card_is_granted_beside_its_shares": (
        (choose, "lock_ids_overlap", operator.eq),
        (availability, "SHARE", "no part of a name"),
    ),
    "places_are_not_counted": ((shares, "count_free_places", count_all_places),),
    "users_are_not_compared": ((shares, "count_free_places", count_for_anybody),),
    "lock_has_no_record": ((grants, "write_record_folder", returning(None)),),
    "state_dir_has_the_boot_id_first": ((boot, "begin_boot", begin_with_state),),
    "record_does_not_shrink": ((grants, "rewrite_claim", returning(None)),),
    "records_alone_do_not_count": (
        (restore, "put_back_lock", returning(None)),
        (claim, "repair_locks", repair_by_locks),
    ),
    "lock_is_not_put_back": ((restore, "put_back_lock", returning(None)),),
    "lost_records_close_no_node": ((boot, "lost_records_refusal", returning(None)),),
    "instance_is_its_card": ((kinds, "is_of_kind", any_part),),
    "models_are_mixed": ((kinds, "group_by_model", one_group),),
    "device_is_chosen_twice": ((kinds, "choose_by_kind", choose_twice),),
    "what_is_found_stays_in_service": ((HealthPolicy, "_quarantine_news", returning({})),),
    "what_was_put_out_stays_out": ((HealthPolicy, "_restore_recovered", returning({})),),
}
FOUND_IN: list[tuple[str, Cast]] = [
    ("gate_is_not_locked", CASTS["commands"]),
    ("lock_is_taken_where_it_is", CASTS["two_jobs"]),
    ("token_is_not_compared", CASTS["shepherd_dies"]),
    ("start_time_is_ignored", CASTS["pid_is_reused"]),
    ("what_is_left_of_a_job_is_not_looked_for", CASTS["straggler"]),
    ("dead_is_who_has_no_shepherd", CASTS["commands"]),
    ("line_is_not_looked_for_in_the_history", CASTS["gpulockd_and_reap"]),
    ("claim_is_not_owed_a_line", CASTS["reboot"]),
    ("living_owner_counts_as_ended", CASTS["straggler"]),
    ("share_joins_a_card_that_is_held", CASTS["slurm_shards_and_a_card"]),
    ("share_joins_a_card_that_is_held", CASTS["a_whole_job_and_a_share"]),
    ("card_is_granted_beside_its_shares", CASTS["slurm_shards_and_a_card"]),
    ("places_are_not_counted", CASTS["sge_shares"]),
    ("users_are_not_compared", CASTS["shares_of_two_users"]),
    ("lock_has_no_record", CASTS["two_jobs"]),
    ("state_dir_has_the_boot_id_first", CASTS["two_jobs"]),
    ("record_does_not_shrink", CASTS["release_of_a_part"]),
    ("record_does_not_shrink", LOST["part_and_lock_dir"]),
    ("records_alone_do_not_count", LOST["locks_and_reap"]),
    ("lock_is_not_put_back", Cast(one=SGE, root=lock_dir_lost("/locks"), d=gpulockd(4))),
    ("lost_records_close_no_node", LOST["both_folders"]),
]
FOUND_IN_KINDS = [
    ("card_is_granted_beside_its_shares", KIND_CASTS["reserve"]),
    ("card_is_granted_beside_its_shares", KIND_CASTS["reserve_of_places"]),
    ("instance_is_its_card", KIND_CASTS["mig_mode"]),
    ("models_are_mixed", KIND_CASTS["models"]),
    ("device_is_chosen_twice", KIND_CASTS["several_kinds"]),
]
FOUND_IN_HEALTH = [
    ("what_is_found_stays_in_service", HEALTH_CASTS["link"]),
    ("what_was_put_out_stays_out", HEALTH_CASTS["link"]),
]
FOUND = [
    *((Site, *row) for row in FOUND_IN),
    *((KindSite, *row) for row in FOUND_IN_KINDS),
    *((HealthSite, *row) for row in FOUND_IN_HEALTH),
]


def plant(patch: pytest.MonkeyPatch, site: Site, fault: str) -> None:
    """Plant a fault in the product."""
    STALE.clear()
    for target, name, instead in FAULTS[fault]:
        patch.setattr(target, name, OpenGate(site) if instead is OpenGate else instead)


def schedules(explorer: Explorer) -> Iterator[tuple[Chooser, int]]:
    """Yield who chooses in a schedule, and its seed."""
    if explorer.cast is KIND_CASTS["reserve"]:  # at random one in 150 finds its fault
        yield from ((Planned(plan), 0) for plan in explorer.each_call("root", "two"))
    for seed in range(1, MOST):
        yield explorer.drawn(seed)[0], seed


@pytest.mark.slow
@pytest.mark.parametrize(("site", "fault", "cast"), FOUND, indirect=["site"])
def test_a_planted_fault_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: str, cast: Cast
) -> None:
    plant(monkeypatch, site, fault)
    explorer = Explorer(site, cast)
    for chooser, seed in schedules(explorer):
        SCHEDULES["of planted faults"] += 1
        if found := explorer.play(chooser, seed):
            assert not found.startswith(FAILED), found
            return
    pytest.fail(f"no promise was broken in {MOST} schedules")


@pytest.mark.slow
def test_a_failure_is_told_by_its_shortest_schedule(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, site, "lock_is_taken_where_it_is")
    explorer = Explorer(site, CASTS["two_jobs"])
    shortest = MOST  # of four that fail: to take choices away one by one may end early
    seeds = iter(range(1, MOST))
    for _ in range(4):
        with pytest.raises(WorldError) as caught:
            for seed in seeds:
                explorer.sample(seed)
        text = str(caught.value)
        words = "and its record of 0000:", "has it, and now job", " at the end"
        assert any(word in text for word in words)
        assert text.count("\n") < 150
        shortest = min(shortest, len(explorer.plan))
    assert shortest <= 4


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
