# SPDX-License-Identifier: Apache-2.0
"""The Prolog when something fails after the claim: the job gets it all, or keeps nothing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.job import environment, job_map
from gpulock.slurm import note, prolog
from gpulock.store import atomic, claim_records
from gpulock.store.locks import LockStore
from tests.support.slurm_site import NODE_BROKEN, REQUEUE_EXIT, RUN, Failing, Site, row
from tests.support.trees import bus

pytestmark = pytest.mark.slow

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}
CALLS = ("mkdir", "rename", "write", "open")
MOST = 90  # system calls of one kind in one Prolog


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    made.apart(monkeypatch)
    return made


@pytest.mark.parametrize("policy", ["stop", "requeue"])
@pytest.mark.parametrize("place", ["tasks", "tasks/n1.12", "mode"])
def test_a_job_that_cannot_be_told_keeps_nothing_and_does_not_start(
    site: Site, place: str, policy: str
) -> None:
    site.set(ON_BROKEN=policy)
    site.prolog(7, "3")
    site.epilog(7)
    if place == "mode":
        site.lock.chmod(0o777)
    elif place == "tasks":
        shutil.rmtree(site.lock / "tasks")
        (site.lock / "tasks").touch()
    else:
        (site.lock / "tasks/n1.12").mkdir()
    assert site.prolog() == NODE_BROKEN
    assert (site.locks(), site.runs()) == ([], [])
    assert len(site.drained()) == (policy == "stop")


def test_a_state_dir_that_cannot_be_written_is_a_broken_node(site: Site) -> None:
    site.prolog(7, "3")
    shutil.rmtree(site.state / "runs")
    (site.state / "runs").touch()
    assert site.prolog() == NODE_BROKEN
    assert "STATE_DIR" in site.drained()[0]
    assert (site.locks(), site.notes()) == ([bus(3)], ["n1.7"])


@pytest.mark.parametrize("gpus", ["0,0", "x", "0\n1"])
def test_slurms_list_is_not_read_where_it_does_not_count(site: Site, gpus: str) -> None:
    """Strange positions beside a count from elsewhere stop nothing and leave nothing behind."""
    site.set(**OURS, SLURM_COUNT="slurmctld")
    site.answers(row(12, Gres="gpu:1"))
    assert site.prolog(12, gpus) == RUN
    assert site.locks() == site.granted() == [bus(0)]
    assert (site.note().positions, site.holder(0).positions) == ([], "")


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
    [(claim_records, "write_claim_record"), (note, "write_task_note"), (job_map, "write_job_map")],
)
def test_whatever_goes_wrong_after_the_claim_undoes_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], fault: BaseException
) -> None:
    site.set(JOB_MAP_DIR=str(site.root / "map"), ON_BROKEN="requeue")
    (site.root / "map").mkdir()
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
    assert (site.locks(), site.runs()) == ([], [])
    assert not [path for path in (site.root / "map").iterdir() if path.stat().st_size]
    monkeypatch.setattr(*where, real)
    assert site.prolog() == RUN
    assert site.granted() == [bus(0), bus(1)]


def fresh(site: Site) -> None:
    """Begin a boot in which nothing was claimed yet."""
    shutil.rmtree(site.lock, ignore_errors=True)
    shutil.rmtree(site.state)
    site.state.mkdir()
    site.map("0", "1", "2", "3")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_whichever_call_fails_the_job_gets_a_whole_grant_or_nothing(
    site: Site, name: str, code: int
) -> None:
    site.set(JOB_MAP_DIR=str(site.root / "map"), ON_BROKEN="requeue")
    (site.root / "map").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for at in range(1, MOST):
        fresh(site)
        environ, config = site.environ(), site.config()
        with pytest.MonkeyPatch.context() as patch:
            calls = Failing(patch, name, at, OSError(code, os.strerror(code))).calls
            found = prolog.main(environ, config)
        # without a note, as without settings, TaskProlog starts no task
        noted = os.path.lexists(f"{site.lock}/tasks/n1.12")
        if found == RUN and noted and not site.note().refused:
            assert site.locks() == site.granted() == [bus(0), bus(1)], f"{name} {at}: {calls[-1]}"
            partial = (site.state / "runs.partial").exists()
            assert site.runs() == ([] if partial else [site.note().token]), f"{name} {at}"
            assert not partial or code == errno.ENOSPC
        else:
            assert (site.locks(), site.runs()) == ([], []), f"{name} {at}: {calls[-1]}"
        if len(calls) < at:
            break
    else:
        pytest.fail("more calls than were thought of")
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' may be closed meanwhile


def nothing(*_: object) -> None:
    """Clean nothing up."""


@pytest.mark.parametrize("name", CALLS)
def test_after_any_crash_epilog_and_next_prolog_leave_nothing_of_it(site: Site, name: str) -> None:
    """A crash is an exception that no clean-up survives: what stands on disk then must do."""
    for at in range(1, MOST):
        fresh(site)
        site.prolog(7, "3")  # of a boot's first claim a crash leads to an adoption
        site.epilog(7)
        environ, config = site.environ(), site.config()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LockStore, "undo", nothing)
            patch.setattr(atomic, "remove_quietly", nothing)
            patch.setattr(prolog, "undo_claim", nothing)
            calls = Failing(patch, name, at, KeyboardInterrupt()).calls
            try:
                prolog.main(environ, config)
            except KeyboardInterrupt:
                pass
        site.epilog()
        assert site.prolog(13) == RUN, f"{name} {at}: {calls[-1]}"
        assert site.granted(13) == site.locks() == [bus(0), bus(1)], f"{name} {at}: {calls[-1]}"
        kept = [token for token in site.runs() if not token.startswith(".")]
        assert kept == [site.note(13).token], f"{name} {at}: {calls[-1]}"
        if len(calls) < at:
            break
    else:
        pytest.fail("more calls than were thought of")


def test_a_note_that_cannot_be_encoded_locks_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_lines(_: object) -> str:
        return "a\nb"

    monkeypatch.setattr(environment, "driver_binds", two_lines)
    assert site.prolog() == RUN
    site.refused(12, "unknown")
    assert (site.locks(), site.runs()) == ([], [])
