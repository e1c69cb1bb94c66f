# SPDX-License-Identifier: Apache-2.0
"""Shares under a real Grid Engine: several jobs on a card, and never more than it has places."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulock.node.devices import SHARE
from tests.labs.common.contention import (
    CONTENDERS,
    contender_script,
    find_cards_had_both_ways,
    prepare_log,
    replay,
)
from tests.labs.common.processes import end
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    SOAK,
    end_carriers,
    group_of,
    held,
    on,
    reap,
    said,
    stopped_queues,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
PLACES = 4  # on each of two cards
COUNT = 250 if SOAK else 20  # jobs of each user
SLEEP = "exec sleep 600\n"
SHOW = 'echo "$CUDA_VISIBLE_DEVICES has $GPULOCK_SHARE"\n'


@pytest.fixture
def shared(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let two cards of NODE be shared, and Grid Engine count their places."""
    gpus.sge.set_complex("gpu_share gpu_share INT <= YES YES 0 0")
    gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16,gpu_share={2 * PLACES}")
    gpus.configure(NODE, SGE_COMPLEXES="gpu gpuj gpu_share=share", SHARES=f"6:{PLACES} 7:{PLACES}")
    yield gpus
    gpus.sge.clear_jobs()
    gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")


def running(gpus: Gpulock, user: str, *words: str) -> JobId:
    """Start a job that sleeps; return its number."""
    job = gpus.sge.submit(user, *on(NODE, *words), stdin=SHOW + SLEEP)
    gpus.sge.wait_running(job)
    return job


def cards(gpus: Gpulock, job: JobId) -> set[str]:
    return {name.partition(SHARE)[0] for name in held(gpus, NODE, job)}


def test_jobs_of_a_user_share_a_card_and_one_that_dies_disturbs_no_neighbour(
    shared: Gpulock,
) -> None:
    one, two = (running(shared, "glalice", "-l", "gpu_share=1") for _ in range(2))
    other = running(shared, "glbob", "-l", "gpu_share=2")
    assert cards(shared, one) == cards(shared, two) != cards(shared, other)
    wait_until(lambda: f"has 1/{PLACES}" in said(shared, one) or None, why="the job's part")
    wait_until(
        lambda: f"has 2/{PLACES}" in said(shared, other, user="glbob") or None, why="its part"
    )
    gid, shepherd = group_of(shared, NODE, one), shared.sge.shepherd_pid(one)
    end([shepherd])
    end_carriers(gid)
    assert reap(shared, NODE).acts().count(("freed", "dead")) == 1
    assert (held(shared, NODE, one), len(held(shared, NODE, two))) == ([], 1)
    assert len(held(shared, NODE, other)) == 2
    whole = running(shared, "glalice", "-l", f"gpu={GPUS - 2}")
    assert not cards(shared, whole) & (cards(shared, two) | cards(shared, other))


def test_sixty_four_jobs_contend_for_places_and_cards(shared: Gpulock) -> None:
    every = " ".join(f"{card}:{PLACES}" for card in range(GPUS))
    shared.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16,gpu_share={GPUS * PLACES}")
    shared.configure(NODE, SGE_COMPLEXES="gpu gpuj gpu_share=share", SHARES=every)
    log = prepare_log(shared.sge.lab / "contention")
    for user in ("glalice", "glbob"):
        for name in ("gpu_share", "gpu"):
            words = on(NODE, "-S", "/bin/bash", "-t", f"1-{CONTENDERS // 4}", "-l", f"{name}=1")
            shared.sge.submit(user, *words, stdin=contender_script(log))
    wait_until(
        lambda: not shared.sge.qstat("-u", "*").strip() and not shared.locks(NODE),
        why="the last job to end",
    )
    lines = log.read_text().splitlines()
    assert replay(lines, PLACES) == (CONTENDERS, "")
    assert find_cards_had_both_ways(lines), "no whole job ever had a card that others shared"
    assert stopped_queues(shared) == {}


def test_many_short_share_jobs_never_hold_more_than_there_is_and_leave_nothing(
    shared: Gpulock,
) -> None:
    log = prepare_log(shared.sge.lab / "contention")
    for user in ("glalice", "glbob"):
        words = on(NODE, "-S", "/bin/bash", "-t", f"1-{COUNT}", "-l", "gpu_share=1")
        shared.sge.submit(user, *words, stdin=contender_script(log))

    def left() -> bool:
        by_card: dict[str, set[int]] = {}
        for name, record in shared.locks(NODE).items():
            card, _, number = name.partition(SHARE)
            by_card.setdefault(card, set()).add(record.uid)
            assert 0 < int(number) <= PLACES
        assert all(len(users) == 1 for users in by_card.values()), by_card
        return not shared.sge.qstat("-u", "*").strip() and not shared.locks(NODE)

    wait_until(left, why="the last job to end")
    assert replay(log.read_text().splitlines(), PLACES) == (2 * COUNT, "")
    assert stopped_queues(shared) == {}
