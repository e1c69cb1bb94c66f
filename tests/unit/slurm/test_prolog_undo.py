# SPDX-License-Identifier: Apache-2.0
"""The Prolog when something fails after the claim: the job gets it all, or keeps nothing."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from gpulock.job import environment
from gpulock.slurm import note
from gpulock.store import boot, grants
from tests.support.faults import raising, returning
from tests.support.slurm_site import NODE_BROKEN, REQUEUE_EXIT, RUN, Site
from tests.support.trees import bus

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    made.apart(monkeypatch)
    return made


@pytest.mark.parametrize("policy", ["stop", "requeue"])
@pytest.mark.parametrize("place", ["tasks", "tasks/n1.12", "mode", "mode of the records"])
def test_a_job_that_cannot_be_told_keeps_nothing_and_does_not_start(
    site: Site, place: str, policy: str
) -> None:
    site.set(ON_BROKEN=policy)
    site.prolog(7, "3")
    site.epilog(7)
    if place == "mode":
        site.lock.chmod(0o777)
    elif place == "mode of the records":
        site.records.chmod(0o777)
    elif place == "tasks":
        shutil.rmtree(site.records / "tasks")
        (site.records / "tasks").touch()
    else:
        (site.records / "tasks/n1.12").mkdir()
    assert site.prolog() == NODE_BROKEN
    assert (site.locks(), site.claims()) == ([], [])
    assert len(site.drained()) == (policy == "stop")


def test_a_state_dir_that_cannot_be_written_in_a_new_boot_is_a_broken_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = OSError(errno.EROFS, "read-only", str(site.state))
    monkeypatch.setattr(boot, "write_boot_id", raising(read_only))
    assert site.prolog() == NODE_BROKEN
    assert str(site.state) in site.drained()[0]
    assert (site.locks(), site.claims(), site.notes()) == ([], [], [])


def test_a_state_dir_that_cannot_be_written_later_stops_no_job(site: Site) -> None:
    """A line of the history may be missing after a reboot; nobody's GPU is."""
    site.prolog(7, "3")
    shutil.rmtree(site.state / "owed")
    (site.state / "owed").touch()
    assert site.prolog() == RUN
    assert site.granted() == [bus(0), bus(1)]


FAULTS = [
    KeyError("x\ny"),
    MemoryError(),
    ValueError("z"),
    OSError(errno.EIO, "worn out"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "where",
    [(grants, "note_owed_line"), (note, "write_task_note")],
)
def test_whatever_goes_wrong_after_the_claim_undoes_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], fault: BaseException
) -> None:
    site.set(ON_BROKEN="requeue")
    times: list[int] = []
    real = getattr(*where)

    def bug(*arguments: object) -> object:
        times.append(1)
        if len(times) == 1:
            raise fault
        return real(*arguments)

    monkeypatch.setattr(*where, bug)
    try:
        assert site.prolog() == RUN
        assert site.note().code == REQUEUE_EXIT
        named = "worn out" if isinstance(fault, OSError) else type(fault).__name__
        assert named in site.note().refused
    except KeyboardInterrupt:
        assert isinstance(fault, KeyboardInterrupt)
    assert (site.locks(), site.claims()) == ([], [])
    monkeypatch.setattr(*where, real)
    assert site.prolog() == RUN
    assert site.granted() == [bus(0), bus(1)]


def test_a_note_that_cannot_be_encoded_locks_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "driver_binds", returning("a\nb"))
    assert site.prolog() == RUN
    site.refused(12, "unknown")
    assert (site.locks(), site.claims()) == ([], [])
