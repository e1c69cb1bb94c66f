# SPDX-License-Identifier: Apache-2.0
"""The crash matrix with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an epilog. What is freed is held against a witness of its
own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import pytest

from tests.labs.both.site import DAEMONISES, SLEEP, Site
from tests.labs.common.installed import SOAK
from tests.labs.common.journal import Journal, doubles
from tests.labs.common.processes import end
from tests.labs.daemon.daemon_lab import (
    CONTAINED,
    WITHOUT_PERIOD,
    WITHOUT_PTRACE,
    Daemon,
    assert_freed,
    assert_held,
    assert_over,
    daemon_on,
    restless,
)
from tests.labs.daemon.daemon_witness import Claim, Witness
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NUMBER = 200 if SOAK else 20


def begun(site: Site, daemon: Daemon, script: str = SLEEP) -> tuple[int, Claim]:
    """Start a job; return it with its claim once gpulockd has seen its processes."""
    job = site.start(2, script)
    daemon.goes_round()
    return job, daemon.claim(job)


# --- what runs without its supervisors ------------------------------------------------------------


def test_what_killed_supervisors_left_keeps_the_devices_until_its_last_process_is_gone(
    site: Site, daemon: Daemon
) -> None:
    job, claim = begun(site, daemon, script=DAEMONISES)
    pids = site.sleepers(job, 2)
    with Witness(claim, pids) as witness:
        site.kill_supervisors(job)
        assert_held(daemon, claim, site.left)
        site.conclude(job)
        for pid in pids:
            assert_held(daemon, claim, site.released)
            end([pid])
        witness.never_free_too_soon(assert_freed(daemon, claim, site.settled))


def test_the_end_of_a_job_wakes_gpulockd(site: Site) -> None:
    with daemon_on(site.gpus, site.node, program=WITHOUT_PERIOD) as daemon:
        job, _ = begun(site, daemon)
        site.leak(job)
        daemon.frees(lambda: site.held(job))


# --- who only looks dead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "why"),
    [(WITHOUT_PTRACE, "cannot be seen"), (CONTAINED, "claimed in pid:")],
    ids=["without CAP_SYS_PTRACE", "in another pid namespace"],
)
def test_a_gpulockd_that_cannot_see_frees_nothing_and_the_next_one_does(
    site: Site, around: tuple[str, ...], why: str
) -> None:
    other = site.start(0)  # of the same user: it may have the devices open, for all that is seen
    with daemon_on(site.gpus, site.node, *around) as blind:
        job, claim = begun(site, blind)
        site.leak(job)
        assert_held(blind, claim, why, "unknown")
        assert blind.freed() == []
    with daemon_on(site.gpus, site.node) as daemon:
        assert_over(daemon, claim, site.leaked)
    site.end(other)


def test_daemons_of_the_scheduler_that_come_and_go_take_no_device_away(
    site: Site, daemon: Daemon
) -> None:
    job, claim = begun(site, daemon)
    with Witness(claim, site.processes(job)) as witness:
        site.stop_daemon()
        assert_held(daemon, claim, site.runs)
        with site.controller_away():
            assert_held(daemon, claim, site.runs)
        site.start_daemon()
        assert_held(daemon, claim, site.runs)
        assert (witness.order, daemon.freed()) == ([], [])


# --- gpulockd itself ------------------------------------------------------------------------------


def test_gpulockd_beside_prologs_and_epilogs_takes_nobodys_device(site: Site) -> None:
    site.configure(SLURM_WAIT="50")
    journal = Journal(site.gpus.cluster.lab / "journal")
    journal.clear()
    script = f"{site.names_itself}{journal.around('sleep 0.$((RANDOM % 4))')}"
    with daemon_on(site.gpus, site.node) as daemon, restless(daemon) as rounds:
        for user in (site.alice, site.bob):
            for gpus in (1, 2):
                site.submit(gpus, script, user=user, tasks=NUMBER // 4)
        site.wait_empty()
        site.gpus.wait_free()  # what an epilog left draining is freed as well
        wait_until(lambda: len(daemon.history()) >= NUMBER, why="their history")
    assert len(rounds) > NUMBER
    holds = journal.holds()
    assert len(holds) == NUMBER
    assert doubles(holds) == []
    assert {len(hold.devices) for hold in holds} == {1, 2}
    assert len({name for hold in holds for name in hold.devices}) >= 4
    lines = daemon.history()
    ran = {(line["job_id"], line["task_id"]) for line in lines}
    assert len(lines) == len(ran) == len({line["token"] for line in lines}) == NUMBER
    assert {line["how"] for line in lines} <= {"epilog", "reap", "claim"}
    reaped = {line["proof"] for line in lines if line["how"] != "epilog"}
    assert reaped <= {"released by its job, whose processes are gone"}
    assert site.in_service()
