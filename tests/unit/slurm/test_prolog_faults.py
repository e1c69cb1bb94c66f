# SPDX-License-Identifier: Apache-2.0
"""The Prolog when something is wrong: what Slurm is told, and nothing kept by a refused job."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.errors import LockTimeout
from gpulock.hooks import frame
from gpulock.job import environment
from gpulock.slurm import epilog, prolog, refuse, request
from gpulock.store import gate
from gpulock.store.event_log import read_events
from gpulock.store.gate import Gate
from tests.support.clock import VirtualClock
from tests.support.faults import fail_at, faulty_settings, raising
from tests.support.slurm_site import NODE_BROKEN, OTHER_UID, RUN, SILENT, UID, Site, row
from tests.support.trees import BOOT, bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    made.apart(monkeypatch)
    return made


def no_driver(site: Site) -> None:
    shutil.rmtree(site.driver)


def a_card_gone(site: Site) -> None:
    (site.driver / "gpus" / bus(1) / "information").unlink()


def no_map(site: Site) -> None:
    (site.state / "slurm-map").unlink()


def no_driver_set(site: Site) -> None:
    site.set(DRIVER_DIR=str(site.root))


def uuids_unread(site: Site) -> None:
    for number in range(4):
        site.gpu(bus(number), number, "GPU-????????-????")
    site.set(VISIBLE_DEVICES="uuid")


def locks_lost(site: Site) -> None:
    (site.state / "boot_id").write_text(BOOT)


BREAKS = [no_driver, a_card_gone, no_map, no_driver_set]
DOUBTS = [uuids_unread, locks_lost]


@pytest.mark.parametrize("spoil", BREAKS)
def test_a_broken_node_is_drained_with_our_reason_and_the_job_does_not_start(
    site: Site, spoil: Callable[[Site], None], capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(site)
    assert site.prolog() == NODE_BROKEN
    (reason,) = site.drained()
    told = capfd.readouterr()
    shown = reason.removesuffix("...")  # of a long path the beginning alone
    assert (told.err.startswith(shown), told.err.count("\n"), told.out) == (True, 1, "")
    assert reason.startswith("gpulock: job 12: broken: ")
    assert (site.locks(), site.notes()) == ([], [])


def write_nothing(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let every write to a file fail."""

    def write(fd: int, data: bytes) -> int:
        if fd > 2:
            raise OSError(number, os.strerror(number))
        return len(data)

    patch.setattr(os, "write", write)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE])
def test_a_full_lock_dir_drains_no_node_and_the_job_is_given_back_without_a_note(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    site.prolog(7, "3")
    before = site.locks()
    site.answers(row(12, State="CONFIGURING"))
    with monkeypatch.context() as full:
        write_nothing(full, number)
        assert site.prolog(12, "0") == RUN
    assert site.calls()[-1] == ["scontrol", "requeue", "12"]
    assert (site.locks(), site.notes(), site.drained()) == (before, ["n1.7"], [])


def test_a_job_that_cannot_be_given_back_without_a_note_does_not_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.set(**OURS)
    site.prolog(7, "3")
    before = site.locks()
    site.fails(SILENT)
    with monkeypatch.context() as full:
        write_nothing(full, errno.ENOSPC)
        assert site.prolog(12, "0") == NODE_BROKEN
    assert (site.locks(), site.notes()) == (before, ["n1.7"])


@pytest.mark.parametrize("spoil", DOUBTS)
def test_what_cannot_be_found_out_is_requeued_and_never_drains(
    site: Site, spoil: Callable[[Site], None]
) -> None:
    spoil(site)
    assert site.prolog() == RUN
    site.refused(12, "unknown")
    assert (site.drained(), site.locks(), site.claims()) == ([], [], [])


def test_a_list_of_slurms_that_cannot_be_read_counts_towards_a_broken_node(site: Site) -> None:
    for number, user in ((13, "alice"), (14, "alice")):
        assert site.prolog(number, "x", SLURM_JOB_USER=user) == RUN
        site.refused(number, "unknown")
    assert site.prolog(15, "0,0", SLURM_JOB_USER="bob") == NODE_BROKEN
    assert "for several jobs in a row" in site.drained()[0]


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"])
def test_a_call_that_does_not_say_whose_it_is_does_nothing_and_starts_nothing(
    site: Site, missing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = site.environ()
    del environ[missing]
    assert prolog.main(environ, site.config()) == NODE_BROKEN
    told = capfd.readouterr().err
    assert (missing in told, told.count("\n")) == (True, 1)
    assert prolog.main({}, site.config()) == NODE_BROKEN
    assert (site.lock.exists(), site.calls()) == (False, [])


@pytest.mark.parametrize(
    "keys",
    [{"EXPECTED_GPUS": "many"}, {"SLURM_CONF": "/etc/\0"}, {"mode": "664"}, {}],
)
def test_settings_that_are_wrong_drain_no_node_and_start_nothing(
    site: Site, keys: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Pushed to a cluster they would drain each node at its next job."""
    path = str(site.root / "gone")
    if "mode" in keys:
        path = site.config()
        os.chmod(path, int(keys["mode"], 8))
    elif keys:
        path = site.config(**keys)

    assert prolog.main(site.environ(), path) == RUN

    told = capfd.readouterr().err
    assert ("unknown: " in told, next(iter(keys), "gone") in told) == (True, True)
    assert (site.drained(), site.lock.exists()) == ([], False)


def test_a_job_that_runs_again_without_settings_is_given_back_by_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of its earlier run may stand, by which its tasks would start."""
    given: list[bool] = []

    def give_back(*words: object) -> str:
        given.append(words[-1] is True)
        return "it is requeued"

    monkeypatch.setattr(refuse, "requeue_or_cancel_job", give_back)
    for restart in ("0", "1"):
        environ = site.environ(SLURM_JOB_RESTART_COUNT=restart)
        assert prolog.main(environ, str(site.root / "gone")) == RUN
    assert given == [True, False]


def test_a_refusal_that_cannot_be_told_starts_nothing_but_a_job_without_gpus(
    site: Site, clock: VirtualClock, capfd: pytest.CaptureFixture[str]
) -> None:
    site.prolog(7, "0")
    shutil.rmtree(site.records / "tasks")
    (site.records / "tasks").touch()
    assert site.prolog(12, "0") == NODE_BROKEN
    busy, broken = capfd.readouterr().err.splitlines()
    assert ("busy" in busy, "broken" in broken) == (True, True)
    assert site.prolog(13, None) == RUN
    assert site.calls() == []


def test_a_gate_that_stays_shut_is_could_not_be_found_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LONGEST_WAIT", 0.05)
    site.prolog(7, "3")
    with Gate(site.node().store, Deadline(1)):
        assert site.prolog() == RUN
    site.refused(12, "unknown")
    assert "timeout" in [kind for _, kind, _ in read_events(str(site.lock))]


@pytest.mark.parametrize("refused", ["", "no"])
def test_a_grant_is_noted_behind_the_gate_alone_and_a_refusal_in_any_case(
    site: Site, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    site.prolog(12, "1")
    node, noted = site.node(), site.note()
    noted.restart, noted.refused = 1, refused
    noted.devices = [] if refused else noted.devices
    monkeypatch.setattr(gate, "LONGEST_WAIT", 0.05)
    with (
        contextlib.nullcontext() if refused else pytest.raises(LockTimeout),
        Gate(node.store, Deadline(1)),
    ):
        prolog.save_task_note(node, noted, Deadline(0.1))
    assert site.note().restart == (1 if refused else 0)


@pytest.mark.parametrize("where", [(request, "count_gres_kinds"), (environment, "grant_variables")])
def test_a_fault_nobody_foresaw_drains_no_node_and_says_where(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str]
) -> None:
    """One job that meets it everywhere would drain node after node."""
    site.prolog(7, "3")
    monkeypatch.setattr(*where, raising(KeyError("x\ny")))
    for number in (12, 13, 14):
        assert site.prolog(number) == RUN
        reason = site.refused(number, "unknown")
        assert ("KeyError" in reason, "faults.py:" in reason) == (True, True)
    assert (site.drained(), site.locks()) == ([], [bus(3)])
    for number, user in ((15, "bob"), (16, "eve")):
        assert site.prolog(number, SLURM_JOB_USER=user) == NODE_BROKEN
    assert "for several jobs in a row" in site.drained()[0]


def test_an_srun_that_is_refused_is_cancelled_since_nothing_else_would_stop_it(
    site: Site, clock: VirtualClock, capfd: pytest.CaptureFixture[str]
) -> None:
    site.prolog(7, "0")
    site.answers(row(12, BatchFlag="0"))
    site.set(SLURM_WAIT="0.1")
    clock.then[1] = clock.run
    environ = site.environ(12, "0")
    del environ["SLURM_JOB_STDIN"]
    assert prolog.main(environ, site.config()) == RUN
    site.refused()
    assert ["scancel", "12"] in site.calls()
    assert "; it is cancelled\n" in capfd.readouterr().err


def test_what_is_told_never_spoils_the_exit_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "write", "/2", BrokenPipeError(32, "broken pipe"))
    assert site.prolog(12, "x") == RUN
    no_map(site)
    assert site.prolog(12, "1") == NODE_BROKEN


@pytest.mark.root
@pytest.mark.parametrize(("environ", "lines"), [({}, 0), ({"SLURM_JOB_ID": "x"}, 1)])
def test_a_hook_that_is_tried_without_a_job_writes_nothing_to_syslog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], lines: int
) -> None:
    """doctor left two lines of errors in there, each time, and of a fault of the settings more."""
    told: list[tuple[object, ...]] = []

    monkeypatch.setattr(frame, "log_to_system", lambda *words: told.append(words))
    assert (prolog.main(environ, "/gone"), len(told)) == (NODE_BROKEN, lines)
    assert (epilog.main(environ, "/gone"), len(told)) == (0, 2 * lines)
    faulty = faulty_settings(tmp_path)
    assert (epilog.main(environ, faulty), len(told)) == (0, 4 * lines)


def test_roots_own_job_is_given_back_like_any_where_settings_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hook that runs as its job's user was started wrongly, but as root."""
    monkeypatch.setattr(refuse, "requeue_or_cancel_job", lambda *_: "it is requeued")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = site.environ(SLURM_JOB_UID="0", SLURM_JOB_USER="root")
    assert prolog.main(environ, str(site.root / "gone")) == RUN
    assert "it is requeued" in capfd.readouterr().err


@pytest.mark.root
@pytest.mark.parametrize(("uid", "code"), [(UID, RUN), (OTHER_UID, NODE_BROKEN)])
def test_a_prolog_that_runs_as_the_jobs_user_takes_no_node_out_of_service(
    site: Site, monkeypatch: pytest.MonkeyPatch, uid: int, code: int
) -> None:
    """24.11's step daemon may start a hook while it has dropped its privileges."""
    path = site.config(SIMULATION="")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert prolog.main(site.environ(), path) == code
    assert (site.locks(), site.notes()) == ([], [])
