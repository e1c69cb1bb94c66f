# SPDX-License-Identifier: Apache-2.0
"""The report at a job's end: made as the job's user, after the release, for a bounded time."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpulock.cli import command_group
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, Refusal
from gpulock.hooks import report_hook
from gpulock.hooks.drop_privileges import CAP_WAKE_ALARM
from gpulock.isolation import tree
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.report import ending
from gpulock.sge import epilog, prolog
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.epilog import slurm_output_path
from tests.support.clock import VirtualClock
from tests.support.history_site import Ended, public_place
from tests.support.jobs import Site, child_of, gpus
from tests.support.runner import command_runner
from tests.support.wait import wait_until

NOBODY = 65534


@pytest.fixture
def site(tmp_path: Path) -> Ended:
    return Ended(tmp_path, REPORT_AT_END="yes")


def at_end(site: Ended, *words: str) -> str:
    """Return what the hidden command prints."""
    done = command_runner().invoke(
        command_group, ["--config", site.config(), "report", "--tokens", "feed", *words]
    )
    assert done.exit_code == 0, done.output
    return done.output


def never(_: float) -> None:
    """Wait, where nothing is to be waited for."""
    pytest.fail("it waited")


def test_it_is_printed_in_ascii(site: Ended) -> None:
    own = site.hold(0)
    site.finish(own, site.account(own, 0))
    site.end(0)
    said = at_end(site)
    assert said.startswith("\ngpulock report\nJob 12 of alice on node1")
    assert said.isascii() and "40 %" in said


def test_it_is_printed_from_the_history_where_the_daemon_was_faster(site: Ended) -> None:
    own = site.hold(0)
    site.finish(own, site.account(own, 0))
    site.end(0)
    site.write()
    assert "Job 12 of alice" in at_end(site)


def test_of_a_claim_that_nobody_knows_nothing_is_printed(site: Ended) -> None:
    assert at_end(site) == ""


def test_it_waits_for_the_exporters_last_word(site: Ended) -> None:
    own = site.hold(0)
    site.sample(site.account(own, 0, busy=1.0))
    site.end(0)
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            site.finish(own, site.account(own, 0, busy=80.0))

    (found,) = ending.gather_ended_claims(site.node(), ["feed"], Deadline(60), pause)
    assert (len(waits), found.cards[0].times.utilization) == (3, 1.0)


def test_it_does_not_wait_for_ever(site: Ended) -> None:
    own = site.hold(0)
    site.sample(site.account(own, 0, busy=8.0))
    site.end(0)
    (found,) = ending.gather_ended_claims(site.node(), ["feed"], Deadline(0), never)
    assert found.cards[0].times.utilization == pytest.approx(0.1)


def test_it_does_not_wait_where_no_exporter_lives(site: Ended) -> None:
    site.claim(0)
    (found,) = ending.gather_ended_claims(site.node(), ["feed"], Deadline(60), never)
    assert found.cards[0].times.utilization is None


def test_a_claim_that_is_kept_for_now_is_told_as_it_stands(site: Ended) -> None:
    site.hold(0)
    (found,) = ending.gather_ended_claims(site.node(), ["feed"], Deadline(60), never)
    assert found.ended is None


def test_it_is_added_to_a_file_of_the_users_own(site: Ended) -> None:
    site.claim(0)
    output = site.root / "slurm-12.out"
    output.write_text("the job's words\n")
    assert at_end(site, "--append", str(output)) == ""
    said = output.read_text()
    assert said.startswith("the job's words\n\ngpulock report\n") and "\x1b" not in said


@pytest.mark.parametrize("kind", ["missing", "link", "fifo", "folder", "other"])
def test_it_is_added_to_nothing_else(tmp_path: Path, kind: str) -> None:
    path, real = tmp_path / "out", tmp_path / "real"
    real.touch()
    if kind == "link":
        path.symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "other":
        path = Path("/dev/null")
    try:
        ending.append_report(str(path), "text")
    except OSError:
        pass
    else:
        assert kind in ("fifo", "other")
    assert real.read_text() == "" and (kind != "missing" or not path.exists())


# --- the epilog's half --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def first_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this machine's gpulock from being found."""
    monkeypatch.setattr(report_hook, "ENVIRONMENT", {**report_hook.ENVIRONMENT})


def put_gpulock(folder: Path, body: str) -> None:
    """Write a program that stands for gpulock; let it be found before any other."""
    program = folder / "gpulock"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    report_hook.ENVIRONMENT["PATH"] = f"{folder}:/usr/bin:/bin"


def settings(tmp_path: Path, body: str, **keys: str) -> Settings:
    put_gpulock(tmp_path, body)
    found = {"LOCK_DIR": f"{tmp_path}/lock"}
    return Settings({**found, "SYS_ROOT": f"{tmp_path}/sys", **keys}, "/etc/x.conf")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the processes that were forked."""
    found: list[int] = []
    real = os.fork

    def fork() -> int:
        pid = real()
        found.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    return found


def code_of(pid: int) -> int:
    """Wait for a process; return how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def spawn(
    tmp_path: Path,
    body: str,
    claims: dict[str, int],
    wait: bool = True,
    gid: int = NOBODY,
    output: str = "",
) -> None:
    report_hook.start_job_report(settings(tmp_path, body), claims, wait, gid, output)


@pytest.mark.root
def test_the_report_has_nothing_of_roots() -> None:
    with public_place(0o777) as place:
        out = place / "out"
        spawn(place, f"(id; env; pwd; cat /proc/self/status) > {out}", {"feed": NOBODY})
        said = out.read_text()
    assert said.startswith(f"uid={NOBODY}") and f"gid={NOBODY}" in said
    assert "CapEff:\t0000000000000000" in said and "Groups:\t \n" in said
    assert f"PATH={place}:/usr/bin:/bin\n" in said and "HOME=" not in said and "\n/\n" in said


@pytest.mark.root
@pytest.mark.parametrize("wait", [True, False], ids=["Grid Engine", "Slurm"])
def test_after_a_job_of_slurms_its_user_cannot_take_the_report_over(
    wait: bool, forked: list[int], clock: VirtualClock
) -> None:
    """ConstrainDevices keeps a job's steps from the GPUs, and not what its Epilog starts.

    To see another's environment takes what to trace it takes (proc(5)).
    """
    clock.run()  # the child is a real program, and waits for us
    with public_place(0o777) as place:
        told, go = place / "told", place / "go"
        body = f"cat /proc/$$/status >{told}.new; mv {told}.new {told}"
        body += f"; until [ -e {go} ]; do sleep 0.01; done"
        caller = threading.Thread(
            target=spawn, args=(place, body, {"feed": NOBODY}), kwargs={"wait": wait}
        )
        caller.start()
        wait_until(told.exists, why="the child to run")
        (pid,) = [word for word in told.read_text().splitlines() if word.startswith("Pid:")]
        look = f"cat /proc/{pid.split()[1]}/environ"
        seen = subprocess.run(
            [
                "setpriv",
                f"--reuid={NOBODY}",
                f"--regid={NOBODY}",
                "--clear-groups",
                "sh",
                "-c",
                look,
            ],
            capture_output=True,
            check=False,
        )
        go.touch()
        caller.join()
        if not wait:
            assert code_of(forked[0]) == 0
        held = 0 if wait else 1 << CAP_WAKE_ALARM
        assert f"\nCapPrm:\t{held:016x}\n" in told.read_text()
        assert (seen.returncode == 0) is wait, seen.stderr


def test_the_report_is_told_which_claims_and_whose_settings(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.touch()
    spawn(tmp_path, f'echo "$@" > {out}', {"b": os.getuid(), "a": os.getuid()}, output="/x y")
    assert out.read_text() == "--config /etc/x.conf report --tokens a,b --append /x y\n"


def test_a_job_that_held_nothing_has_no_report(tmp_path: Path) -> None:
    spawn(tmp_path, f"touch {tmp_path}/out", {})
    spawn(tmp_path, f"touch {tmp_path}/out", {"a": 1, "b": 2})
    assert not (tmp_path / "out").exists()


def test_a_report_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: list[int]
) -> None:
    monkeypatch.setattr(report_hook, "SECONDS", 0)  # no alarm
    real = report_hook.wait_for_report

    def end(pid: int, _: Deadline) -> None:
        real(pid, Deadline(0.0))

    monkeypatch.setattr(report_hook, "wait_for_report", end)
    spawn(tmp_path, "exec sleep 1000", {"a": os.getuid()})
    assert code_of(forked[0]) == -9


def test_an_alarm_that_outlives_exec_ends_it_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: list[int]
) -> None:
    monkeypatch.setattr(report_hook, "SECONDS", 1)
    spawn(tmp_path, "exec sleep 1000", {"a": os.getuid()}, wait=False)
    assert code_of(forked[0]) == -14


def test_a_program_that_is_not_there_harms_nobody(tmp_path: Path) -> None:
    set_up = settings(tmp_path, "")
    (tmp_path / "gpulock").unlink()
    report_hook.start_job_report(set_up, {"a": os.getuid()}, wait=True)


def isolated(tmp_path: Path, patch: pytest.MonkeyPatch, refused: bool = False) -> str:
    """Run a report under ISOLATION=cgroup; return the cgroup's name that it had before it began."""
    out = tmp_path / "out"

    def confine(_: Node, label: str, pid: int, start: int, granted: list[Device]) -> None:
        assert (pid, granted) == (os.getpid(), [])
        if refused:
            raise Refusal(BROKEN, "no cgroup", "mount one")
        out.write_text(tree.cgroup_name(label, pid, start))

    # as the hook finds it: another test may have had the package loaded anew
    job = importlib.import_module("gpulock.isolation.job")
    patch.setattr(job.confine, "confine_process", confine)
    body = f"cat {out}; echo; echo $$"
    keys = settings(tmp_path, f"({body}) > {tmp_path}/said", ISOLATION="cgroup")
    report_hook.start_job_report(keys, {"a": os.getuid()}, wait=True)
    said = tmp_path / "said"
    return said.read_text() if said.exists() else ""


def test_under_isolation_the_report_is_closed_in_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pid = isolated(tmp_path, monkeypatch).split()
    found = tree.parse_cgroup_name(name)  # by which a reconcile knows it for one of ours
    assert found is not None and str(found[0]) == pid


def test_a_report_that_cannot_be_closed_in_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isolated(tmp_path, monkeypatch, refused=True) == ""


def test_the_report_loads_nothing_from_its_users_home(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flag = "import sys; print(sys.flags.no_user_site)"
    spawn(tmp_path, f"{sys.executable} -c '{flag}' > {out}", {"a": os.getuid()})
    assert out.read_text() == "1\n"


def test_without_waiting_nothing_of_ours_is_held_open(tmp_path: Path, forked: list[int]) -> None:
    out = tmp_path / "out"
    out.touch()
    out.chmod(0o666)
    spawn(tmp_path, f"ls -l /proc/self/fd > {out}", {"a": os.getuid()}, wait=False)
    assert code_of(forked[0]) == 0
    assert "pipe:" not in out.read_text() and "/dev/null" in out.read_text()


@pytest.mark.parametrize("on", [True, False])
def test_an_epilog_has_the_report_printed_after_the_release_where_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    site = Site(tmp_path)
    child_of(monkeypatch, site)
    body = f'ls {site.lock}/locks | wc -l > {tmp_path}/out; echo "$@" >> {tmp_path}/out'
    put_gpulock(tmp_path, body)
    site.settings["REPORT_AT_END"] = "yes" if on else "no"
    job = site.run(gpus(2))
    assert prolog.main(["sge", str(site.pid)], site.environ(job), site.config()) == 0
    token = site.node().store.read_all_locks()
    first = next(iter(token.values())).owner
    assert first is not None
    assert epilog.main(["sge", str(site.pid)], site.environ(job), site.config()) == 0
    assert (tmp_path / "out").exists() is on
    if on:
        held, words = (tmp_path / "out").read_text().splitlines()
        assert held == "0" and f"--tokens {first.token}" in words


def test_off_an_epilog_does_not_even_load_the_reporter() -> None:
    program = "import gpulock.sge.epilog, gpulock.slurm.epilog, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "gpulock.alloc.release" in done.stdout and "gpulock.hooks.report_hook" not in done.stdout


@pytest.mark.parametrize(
    ("told", "folder", "output"),
    [
        ("/home/a/out.%j", "", "/home/a/out.12"),
        ("out.%j-%u", "/home/a", "/home/a/out.12-alice"),
        ("out", "", ""),
        ("/home/a/%x.out", "/home/a", ""),
        ("", "/home/a", ""),
    ],
)
def test_slurms_name_of_an_output_file_is_understood_or_left_alone(
    told: str, folder: str, output: str
) -> None:
    environ = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_UID": "1000",
        "SLURM_JOB_USER": "alice",
        "SLURMD_NODENAME": "n1",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_STDIN": "/dev/null",
        "SLURM_JOB_STDOUT": told,
        "SLURM_JOB_WORK_DIR": folder,
    }
    assert slurm_output_path(SlurmHookCall(environ), environ) == output
