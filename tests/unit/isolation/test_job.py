# SPDX-License-Identifier: Apache-2.0
"""How a job's isolation begins and ends, and what is said where the kernel does not do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.isolation import confine, sessions
from gpulock.isolation.job import (
    IsolatedJob,
    begin_job_isolation,
    end_job_isolation,
    prepare_slurm_isolation,
)
from tests.support.faults import raising
from tests.support.trees import Box

JOB = IsolatedJob("12.1", 500, 1000)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with cgroups."""
    made = Box(tmp_path, ISOLATION="cgroup")
    cgroups = tmp_path / "sys/fs/cgroup"
    cgroups.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.controllers"):
        (cgroups / name).touch()
    return made


def test_logins_are_closed_before_a_job_is_confined(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(sessions, "close_login_cgroups", lambda *_: done.append("logins"))
    monkeypatch.setattr(confine, "confine_process", lambda *_: done.append("job"))

    begin_job_isolation(box.node(), JOB, [])

    assert done == ["logins", "job"]


@pytest.mark.parametrize(
    "fault", [Refusal(BROKEN, "no cgroups", "mount them"), OSError("no cgroups")]
)
def test_an_end_that_fails_says_why(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(confine, "end_confinement", raising(fault))
    monkeypatch.setattr(confine, "remove_step_cgroups", raising(fault))

    assert end_job_isolation(box.node(), "12-", JOB) == "no cgroups"
    assert end_job_isolation(box.node(), "12.") == "no cgroups"


def test_a_slurmd_that_ends_while_it_is_closed_makes_its_job_wait(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "close_launcher", raising(ProcessLookupError("700")))

    with pytest.raises(Refusal, match="slurmd ended meanwhile: 700") as refused:
        prepare_slurm_isolation(box.node(), [700])

    assert refused.value.kind == UNKNOWN
