# SPDX-License-Identifier: Apache-2.0
"""The Prolog where a device is held: by an earlier run, another job, or what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clock import VirtualClock
from tests.support.slurm_site import OTHER_UID, RUN, Site, freezer
from tests.support.trees import OTHER_BOOT, bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


@pytest.mark.parametrize("keys", [{}, OURS])
@pytest.mark.parametrize("what", ["daemon", "cgroup", "open", "marked"])
def test_a_second_prolog_waits_for_what_the_first_run_left_and_is_refused(
    site: Site, clock: VirtualClock, what: str, keys: dict[str, str]
) -> None:
    site.set(**keys)
    site.prolog()
    if what == "daemon":
        site.stepd(700, "12.extern")
    elif what == "cgroup":
        site.cgroup(freezer(), 900)
    elif what == "open":
        site.process(900, "python", fds={9: site.dev / "nvidia0"})
    else:
        site.left_by(900)
    assert site.prolog(12, "0,1", SLURM_JOB_RESTART_COUNT="1") == RUN
    assert ("700" if what == "daemon" else "900") in site.refused()
    assert clock.slept == pytest.approx(15)
    assert (bus(0) in site.locks(), site.holder(0).restart) == (True, 0)


def test_what_another_user_holds_under_the_same_id_stays_that_users(
    site: Site, clock: VirtualClock
) -> None:
    """slurmctld lost its state and gave the id again (docs/facts/slurm.md, job ids)."""
    site.hold(0, job_id="12", uid=OTHER_UID)
    assert site.prolog(12, "0") == RUN
    site.refused()
    assert (site.holder(0).uid, site.holder(0).token) == (OTHER_UID, "t7")
    site.set(**OURS)
    assert site.prolog(12, "0") == RUN
    assert site.granted() == [bus(1)]


def test_what_a_later_run_of_the_job_holds_is_its_own(site: Site, clock: VirtualClock) -> None:
    site.hold(0, job_id="12", restart=5)
    assert site.prolog(12, "0", SLURM_JOB_RESTART_COUNT="4") == RUN
    site.refused()
    assert site.holder(0).restart == 5


@pytest.mark.parametrize("keys", [{}, {**OURS, "EXPECTED_GPUS": "1"}])
def test_a_device_that_is_held_is_waited_for_and_then_the_job_is_refused(
    tmp_path: Path, clock: VirtualClock, keys: dict[str, str]
) -> None:
    site = Site(tmp_path, 1, **keys)
    site.prolog(7, "0")
    assert site.prolog(12, "0") == RUN
    assert "job 7" in site.refused()
    assert clock.slept == pytest.approx(15)
    assert clock.sleeps == sorted(clock.sleeps[:-1]) + clock.sleeps[-1:]
    assert (len(clock.sleeps) < 20, max(clock.sleeps) <= 2) == (True, True)
    assert site.claims() == [site.note(7).token]


def test_how_long_is_waited_is_the_sites(site: Site, clock: VirtualClock) -> None:
    site.set(SLURM_WAIT="3")
    site.hold(0)
    site.prolog()
    site.refused()
    assert clock.slept == pytest.approx(3)


def test_the_gate_is_not_held_while_a_device_is_waited_for(site: Site, clock: VirtualClock) -> None:
    site.hold(0)
    clock.then[1] = lambda: site.prolog(13, "2")
    site.prolog(12, "0")
    assert site.granted(13) == [bus(2)]


def test_what_its_epilog_gave_up_is_taken_once_nobody_is_left(
    site: Site, clock: VirtualClock
) -> None:
    site.prolog(7, "0")
    site.process(900, "python")
    folder = site.cgroup(freezer(7), 900)
    site.epilog(7)
    assert site.holder(0).draining == 1
    assert site.prolog(12, "0") == RUN
    site.refused()
    (folder / "cgroup.procs").write_text("")
    site.prolog(8, "1")
    site.process(901, "python", fds={9: site.dev / "nvidia0"})  # CUDA opens what it can see
    site.started_with(901, SLURM_JOB_ID="8", SLURMD_NODENAME="n1")
    assert site.prolog(12, "0") == RUN
    assert site.granted() == [bus(0)]
    assert site.claims() == sorted([site.note(8).token, site.note().token])


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"boot_id": OTHER_BOOT}, True),
        ({"boot_id": OTHER_BOOT, "job_id": "12"}, True),
        ({"boot_id": OTHER_BOOT, "scheduler": "process"}, True),
        ({"scheduler": "process", "pid": 4711, "start": 1}, True),
        ({"scheduler": "process", "pid": 1, "start": 1000}, False),
        ({"scheduler": "admin"}, False),
        ({"scheduler": "sge"}, False),
        ({"node": "node2", "boot_id": OTHER_BOOT}, True),
    ],
)
def test_others_are_judged_by_their_own_rules(
    site: Site, clock: VirtualClock, changes: dict[str, object], taken: bool
) -> None:
    site.hold(0, **changes)
    site.prolog(12, "0")
    assert (site.holder(0).token != "t7") is taken
    assert (site.note().refused == "") is taken
