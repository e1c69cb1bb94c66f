# SPDX-License-Identifier: Apache-2.0
"""Whether a Slurm job is alive: what the node shows first, then slurmctld, else unknown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.liveness import Judge
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm import epilog, prolog
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.faults import fail_at
from tests.support.slurm_site import (
    INVALID,
    OTHER_UID,
    ROOT,
    SILENT,
    UID,
    Site,
    freezer,
    row,
    slurm_lock,
)
from tests.support.trees import OTHER_BOOT


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node with slurmd, whose slurmctld does not answer."""
    made = Site(tmp_path)
    made.process(60, "slurmd", uid=ROOT)
    made.fails(SILENT)
    return made


def verdict(
    site: Site,
    seen: bool = False,
    make: Callable[[Node], Judge] = make_liveness_judge,
    /,
    **changes: object,
) -> Verdict:
    """Return the verdict on job 12, whose extern step was seen or not."""
    lock = slurm_lock(**changes)
    lock.seen = seen
    return make(site.node()).verdict(lock)


def state(site: Site, seen: bool = False, **changes: object) -> str:
    return verdict(site, seen, make_liveness_judge, **changes).state


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("step", ["extern", "batch", "0"])
def test_a_job_lives_while_a_step_daemon_of_it_runs_whatever_slurmctld_says(
    site: Site, step: str, seen: bool
) -> None:
    site.answers(row(12, State="COMPLETED"))
    site.stepd(700, f"12.{step}")
    found = verdict(site, seen)
    assert (found.state, "700" in found.proof) == (ALIVE, True)
    assert site.calls() == []


def test_a_step_daemon_without_a_title_may_be_anybodys(site: Site) -> None:
    site.answers(row(12, State="COMPLETED"))
    site.stepd(700, "")
    assert state(site, True) == UNKNOWN
    site.stepd(701, "12.0")
    assert state(site, True) == ALIVE
    site.stepd(701, "13.0")
    assert state(site, True) == UNKNOWN


def test_a_job_lives_while_a_process_of_it_is_there(site: Site) -> None:
    site.fails(INVALID)
    folder = site.cgroup(freezer(), 900)
    assert state(site, True) == ALIVE
    (folder / "cgroup.procs").write_text("")
    assert state(site, True) == DEAD


OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"),
    *("DEADLINE", "PREEMPTED"),
)
GOES_ON = (
    *("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "PENDING", "STOPPED", "REQUEUED"),
    *("REQUEUE_HOLD", "SIGNALING", "STAGE_OUT", "completed", "COMPLETED+", "SOMETHING_NEW"),
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *[({"State": state}, ALIVE) for state in GOES_ON],
        *[({"State": state}, DEAD) for state in OVER],
        ({"State": "PENDING", "RestartCnt": "1"}, DEAD),
        ({"State": "RUNNING", "RestartCnt": "1"}, DEAD),
        ({"State": "COMPLETING", "RestartCnt": "1"}, ALIVE),
        ({"State": "REQUEUED", "RestartCnt": "1"}, ALIVE),
        ({"State": "RUNNING", "UserID": str(OTHER_UID)}, DEAD),
        *[({"State": "RUNNING", "UserID": u}, UNKNOWN) for u in ("alice", "", "-1", "\u00b2")],
        ({"State": ""}, UNKNOWN),
        ({"State": "PENDING", "RestartCnt": "x"}, ALIVE),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_where_nothing_is_to_be_seen_slurmctld_says_it(
    site: Site, answer: dict[str, str], expected: str, seen: bool
) -> None:
    site.answers(row(12, **answer))
    assert state(site, seen) == expected
    assert len(site.calls()) == 1


def test_a_job_of_roots_is_judged_like_any_other(site: Site) -> None:
    site.answers(row(12, UserID="0"))
    assert state(site, uid=0) == ALIVE
    site.answers(row(12, UserID="0", State="COMPLETED"))
    assert state(site, uid=0) == DEAD


def test_a_job_that_slurmctld_does_not_know_is_dead_unless_its_epilog_gave_it_up(
    site: Site,
) -> None:
    site.fails(INVALID)
    assert (state(site), state(site, draining=1)) == (DEAD, ALIVE)


def test_in_silence_absence_counts_only_after_the_extern_step_was_seen(site: Site) -> None:
    assert (state(site, False), state(site, True)) == (UNKNOWN, DEAD)


def test_in_silence_absence_counts_only_where_slurmd_is_to_be_seen(site: Site) -> None:
    site.proc.remove(60)
    assert state(site, True) == UNKNOWN
    site.process(60, "slurmd", uid=UID)
    assert state(site, True) == UNKNOWN


def test_an_environment_that_cannot_be_read_makes_absence_unknown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.fails(INVALID)
    site.process(700, "sh", uid=UID)
    fail_at(monkeypatch, "open", "/700/environ", PermissionError(13, "denied"))
    assert state(site, True) == UNKNOWN


@pytest.mark.parametrize("body", [f"echo '{INVALID}' >&2; exit 1", "exit 0"])
def test_a_prolog_judges_no_other_job_of_this_boot_and_asks_nobody(site: Site, body: str) -> None:
    site.program("squeue", body)
    assert verdict(site, True, prolog.make_slurm_prolog_judge).state == UNKNOWN
    assert verdict(site, True, prolog.make_slurm_prolog_judge, boot_id=OTHER_BOOT).state == DEAD
    assert verdict(site, True, prolog.make_slurm_prolog_judge, draining=1).state == ALIVE
    assert site.calls() == []


def test_an_epilog_judges_nobody_but_what_is_left_of_its_own(site: Site) -> None:
    assert verdict(site, True, epilog.make_slurm_epilog_judge).state == UNKNOWN
    made = epilog.make_slurm_epilog_judge(site.node())
    assert made.job_processes(slurm_lock()).reason() == ""
    site.cgroup(freezer(), 900)
    assert made.job_processes(slurm_lock()).reason() != ""
