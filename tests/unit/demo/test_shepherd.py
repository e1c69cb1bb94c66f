# SPDX-License-Identifier: Apache-2.0
"""The simulated shepherd: what hooks see of it, and what follows from their exit status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.shepherd import Shepherd, ShepherdResult
from tests.support import execd

LONG = ("/bin/sleep", "300")


def spool(tmp_path: Path, *command: str) -> execd.SpooledJob:
    job = execd.SimulatedJob(job_id=7, command=command or ("/bin/true",), cwd=str(tmp_path))
    return execd.spool_job(tmp_path, job)


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def run(spooled: execd.SpooledJob, prolog: str = "", epilog: str = "") -> ShepherdResult:
    shepherd = Shepherd(spooled, shell(prolog) if prolog else [], shell(epilog) if epilog else [])
    shepherd.start()
    return shepherd.wait(30)


def family(pid: int) -> tuple[int, int, int]:
    """Return parent, process group and session of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[1]), int(fields[2]), int(fields[3])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Shepherd]:
    shepherd = Shepherd(spool(tmp_path, *LONG))
    shepherd.start()
    shepherd.job_pid()
    yield shepherd
    shepherd.kill_job()
    shepherd.kill()


def test_it_has_the_name_and_the_folder_of_a_shepherd(running: Shepherd) -> None:
    proc = Path(f"/proc/{running.pid}")
    assert (proc / "comm").read_text() == "sge_shepherd\n"
    assert (proc / "cwd").readlink() == running.spooled.folder
    assert (running.spooled.folder / "pid").read_text() == f"{running.pid}\n"


def test_the_job_is_a_child_of_it_in_its_session(running: Shepherd) -> None:
    parent, group, session = family(running.job_pid())
    assert (parent, group, session) == (running.pid, running.job_pid(), running.pid)
    assert running.pid != os.getsid(0)


def test_a_hook_is_not_in_its_session(tmp_path: Path) -> None:
    shepherd = Shepherd(spool(tmp_path), shell("cat /proc/self/stat > stat"))
    shepherd.start()
    shepherd.wait(30)
    session = int((tmp_path / "stat").read_text().rpartition(") ")[2].split()[3])
    assert session != shepherd.pid


def test_the_prolog_is_a_child_of_it_with_a_clean_environment(tmp_path: Path) -> None:
    spooled = spool(tmp_path)
    shepherd = Shepherd(spooled, shell("/usr/bin/env > env; echo $PPID > parent"))
    shepherd.start()
    shepherd.wait(30)
    assert int((tmp_path / "parent").read_text()) == shepherd.pid
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    shells_own = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {name: found[name] for name in found.keys() - shells_own} == {
        "JOB_ID": "7",
        "SGE_TASK_ID": "0",
        "QUEUE": "gpu.q",
        "PATH": "/usr/bin:/bin",
    }


def test_prolog_job_and_epilog_run_one_after_another(tmp_path: Path) -> None:
    spooled = spool(tmp_path, *shell("echo job >> order"))
    result = run(spooled, "echo prolog >> order", "echo epilog >> order")
    assert (tmp_path / "order").read_text().split() == ["prolog", "job", "epilog"]
    assert result == ShepherdResult(0, 0, 0)


def test_what_a_prolog_writes_into_environment_reaches_the_job(tmp_path: Path) -> None:
    spooled = spool(tmp_path, *shell('echo "$CUDA_VISIBLE_DEVICES" > seen'))
    environment = spooled.folder / "environment"
    run(spooled, f"echo CUDA_VISIBLE_DEVICES=2,3 >> {environment}")
    assert (tmp_path / "seen").read_text() == "2,3\n"


def test_an_escaped_newline_reaches_the_job_as_one(tmp_path: Path) -> None:
    job = execd.SimulatedJob(
        job_id=8,
        command=tuple(shell('printf "%s" "$A" > seen')),
        cwd=str(tmp_path),
        variables=(("A", "one\ntwo\\n"),),
    )
    run(execd.spool_job(tmp_path, job))
    assert (tmp_path / "seen").read_text() == "one\ntwo\\n"


def test_hooks_and_job_print_into_the_output_of_the_job(tmp_path: Path) -> None:
    spooled = spool(tmp_path, *shell("echo job"))
    run(spooled, "echo prolog >&2")
    assert spooled.output.read_text() == "prolog\njob\n"


@pytest.mark.parametrize("status", [99, 100, 1, 127])
def test_a_prolog_that_fails_keeps_the_job_from_running_but_not_the_epilog(
    tmp_path: Path, status: int
) -> None:
    result = run(spool(tmp_path), f"exit {status}", "true")
    assert result == ShepherdResult(status, None, 0)


def test_a_prolog_ended_by_a_signal_keeps_the_job_from_running(tmp_path: Path) -> None:
    result = run(spool(tmp_path), "kill -9 $$")
    assert (result.prolog, result.job) == (137, None)


def test_a_missing_prolog_is_an_error_of_the_job_and_no_epilog_runs(tmp_path: Path) -> None:
    shepherd = Shepherd(spool(tmp_path), [str(tmp_path / "none")], shell("touch epilog"))
    shepherd.start()
    assert shepherd.wait(30) == ShepherdResult("missing", None, None)
    assert not (tmp_path / "epilog").exists()


def test_the_end_of_an_epilog_is_told(tmp_path: Path) -> None:
    assert run(spool(tmp_path), "true", "exit 3") == ShepherdResult(0, 0, 3)


def test_the_job_lives_on_when_the_shepherd_is_killed(running: Shepherd) -> None:
    pid = running.job_pid()
    running.kill()
    assert not Path(f"/proc/{running.pid}").exists()
    assert "sleep" in Path(f"/proc/{pid}/comm").read_text()
    assert running.wait().epilog is None
    running.kill_job()


def test_the_epilog_runs_after_a_job_that_was_killed(tmp_path: Path) -> None:
    shepherd = Shepherd(spool(tmp_path, *LONG), epilog=shell("touch epilog"))
    shepherd.start()
    shepherd.kill_job()
    assert shepherd.wait(30) == ShepherdResult(None, 137, 0)
    assert (tmp_path / "epilog").exists()


@pytest.mark.root
def test_root_gives_the_job_its_additional_group(tmp_path: Path) -> None:
    job = execd.SimulatedJob(job_id=9, command=LONG, cwd=str(tmp_path), add_grp_id=65432)
    shepherd = Shepherd(execd.spool_job(tmp_path, job))
    shepherd.start()
    try:
        status = Path(f"/proc/{shepherd.job_pid()}/status").read_text()
        assert "\nGroups:\t65432" in status
        assert (shepherd.spooled.folder / "addgrpid").read_text() == "65432\n"
    finally:
        shepherd.kill_job()
        shepherd.wait(30)
