# SPDX-License-Identifier: Apache-2.0
"""A job's own rlimits never cost the node a queue, a lock or a second run of the job."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.labs.common.installed import script
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import claims, on, records, said
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE = NODES[0]
CAP_SYS_RESOURCE = 24
SIGNALLED = 128
JOB = ("1", "0", "gpu.q")
MEMORY = ("h_vmem=8M", "h_vmem=0", "h_vmem=1")  # no room for an interpreter: facts/grid-engine.md
ALL = "h_vmem=8M,h_data=1M,h_stack=16k,h_fsize=0,h_cpu=1"
OTHERS = ("h_data=1M", "h_stack=16k", "h_fsize=0", "h_cpu=1")
HARMLESS = (*OTHERS[1:], "h_vmem=64M,h_data=64M,h_stack=1M,h_fsize=1M,h_cpu=1")


def may_raise(gpus: Gpulock) -> bool:
    """Return whether execd's children may lift limits: CAP_SYS_RESOURCE is in its bounds."""
    status = Path(f"/proc/{gpus.sge.execd_pid(NODE)}/status").read_text()
    bounds = int(status.partition("CapBnd:")[2].split()[0], 16)
    return bool(bounds >> CAP_SYS_RESOURCE & 1)


def test_jobs_under_tiny_limits_run_once_or_are_refused_and_no_queue_stops(
    gpus: Gpulock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tried: `-l h_vmem`, `h_data`, `h_stack`, `h_fsize` and `h_cpu` that leave a hook no room.

    Stopped by: `drop-env` lifts them; where it may not, the job is at fault and no queue stops.
    """
    raising = may_raise(gpus)
    with capsys.disabled():
        print(f"\n[limits: root {'may' if raising else 'may not'} lift them here] ", end="")
    home = gpus.sge.users["glalice"].home
    asked = [*MEMORY, ALL, *OTHERS]
    jobs = {
        limits: gpus.sge.submit(
            "glalice",
            *on(NODE, "-l", f"gpu=1,{limits}"),
            stdin=f"echo x >>{home}/ran.{number}\n",
        )
        for number, limits in enumerate(asked)
    }
    ended = {limits: gpus.sge.wait_state(job, "", "Eqw") for limits, job in jobs.items()}
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    granted = claims(gpus, NODE)
    for number, (limits, job) in enumerate(jobs.items()):
        ran = home / f"ran.{number}"
        times = len(ran.read_text().splitlines()) if ran.exists() else 0
        failed = [record["failed"].split()[0] for record in records(gpus, job)]
        if raising or limits in HARMLESS:
            assert ended[limits] == "", limits
        if ended[limits] == "":
            assert (times, failed) == (1, ["0"]), limits
            assert len(granted[str(job)]) == 1, limits
        else:
            assert times == 0 and failed == ["30"], limits
            assert re.search("limits.*ask for h", said(gpus, job)), limits
    if not raising:
        assert all(ended[limits] == "Eqw" for limits in (*MEMORY, ALL)), ended


def test_jobs_without_gpus_and_jobs_ended_by_a_limit_leave_the_queue_alone(gpus: Gpulock) -> None:
    """Tried: jobs that a limit of time or of file sizes ends, and one without GPUs and memory.

    Stopped by: `drop-env` lifts the limits before the hook, and an epilog ends with 0.
    """
    spin = "while :; do :; done\n"
    masked = gpus.sge.submit("glalice", *on(NODE, "-l", "h_vmem=8M"), stdin="echo ran\n")
    burner = gpus.sge.submit("glalice", *on(NODE, "-l", "h_cpu=1,gpu=1"), stdin=spin)
    writer = gpus.sge.submit(
        "glalice", *on(NODE, "-l", "h_fsize=0,gpu=1"), stdin="head -c 99999 /dev/zero >$HOME/big\n"
    )
    jobs = (masked, burner, writer)
    ended = [gpus.sge.wait_state(job, "", "Eqw") for job in jobs]
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    assert ended[1:] == ["", ""]
    assert all(len(records(gpus, job)) == 1 for job in jobs)
    if may_raise(gpus):
        assert said(gpus, masked) == "ran\n"
    else:
        assert ended[0] == "Eqw" and "limits" in said(gpus, masked)


def test_a_large_environment_under_a_file_limit_refuses_the_job_and_not_the_node(
    gpus: Gpulock,
) -> None:
    """Tried: an environment that is longer than `h_fsize` lets a file be; its floor is 15 KiB.

    Stopped by: a prolog that cannot write it refuses that job alone.
    """
    large = ",".join(f"BIG{n}={'x' * 5000}" for n in range(8))
    job = gpus.sge.submit(
        "glalice", *on(NODE, "-v", large, "-l", "h_fsize=0,gpu=1"), stdin="echo ran\n"
    )
    ended = gpus.sge.wait_state(job, "", "Eqw")
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    if may_raise(gpus):
        assert ended == ""
    else:
        assert ended == "Eqw"
        limits = "under the job's own limits (h_vmem, h_data, h_stack, h_fsize)"
        assert f"invalid request: {limits}: its environment is too large" in said(gpus, job)


def test_every_limit_is_lifted_first_and_drop_env_becomes_the_prolog_where_it_may(
    gpus: Gpulock, tmp_path: Path
) -> None:
    """Tried: limits of a job upon its prolog, where they may be lifted; seen by strace.

    Stopped by: every limit is lifted before execve(2).
    """
    calls = traced(gpus, tmp_path, "prolog", "inject=prlimit64:retval=0:when=2+2")
    lifted = [limit for limit in calls if limit != "execve"]
    assert lifted == ["RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_STACK"]
    assert calls[-1] == "execve"
    assert (tmp_path / "limited").read_text() == "no\n"


def test_a_prolog_stays_a_child_where_a_limit_stays(gpus: Gpulock, tmp_path: Path) -> None:
    """Tried: limits of a job upon its prolog, where one cannot be lifted.

    Stopped by: drop-env stays above the prolog, and answers for it.
    """
    traced(gpus, tmp_path, "prolog", "inject=prlimit64:error=EPERM:when=4+2")
    assert (tmp_path / "limited").read_text() == "1\n"


def test_an_epilog_is_0_to_grid_engine_and_a_prolog_under_limits_never_stops_a_queue(
    gpus: Gpulock, tmp_path: Path
) -> None:
    """Tried: hooks that end by any code or signal under a limit.

    Stopped by: drop-env answers 0 for an epilog, and 99 or 100 for a prolog.
    """
    for code in (1, 2, 99, 100, 127, 137, 139):
        last = f"kill -{code - 128} $$" if code > SIGNALLED else f"exit {code}"
        ended: dict[str, int] = {}
        for hook in ("epilog", "prolog"):
            path = hook_script(tmp_path, hook, last)
            limited = ["prlimit", "--data=12000000", str(gpus.hooks.drop_env), str(path), *JOB]
            ended[hook] = subprocess.run(limited, check=False).returncode
        assert ended["epilog"] == 0
        if may_raise(gpus):
            assert ended["prolog"] in (code, SIGNALLED - code)
        else:
            assert ended["prolog"] == (code if code in (99, 100) else 100)


def hook_script(folder: Path, hook: str, line: str) -> Path:
    """Write a hook of one line where drop-env takes it for a prolog or an epilog."""
    path = folder / hook / "sge"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def traced(gpus: Gpulock, folder: Path, hook: str, how: str) -> list[str]:
    """Run drop-env under strace; return the limits it set, and `execve` of the hook."""
    program = hook_script(folder, hook, f'echo "${{GPULOCK_LIMITED-no}}" >"{folder}/limited"')
    log = folder / "strace"
    trace = ["strace", "-f", "-o", str(log), "-e", "trace=prlimit64,setrlimit,execve", "-e", how]
    subprocess.run([*trace, str(gpus.hooks.drop_env), str(program), *JOB], check=True, timeout=120)
    found: list[str] = []
    for line in log.read_text().splitlines():
        if set_ := re.search(r"(?:prlimit64\(0, |setrlimit\()(RLIMIT_\w+), \{", line):
            found.append(set_[1])
        elif f'execve("{program}"' in line:
            found.append("execve")
    return found


def test_the_limits_of_a_hook_are_those_of_the_job(gpus: Gpulock) -> None:
    """Tried: a hook of the site's: it runs under the job's own `h_vmem`, as shepherds have it.

    Stopped by: nothing here; `drop-env` is what such a hook lacks.
    """
    home = gpus.sge.users["glalice"].home
    seen = home / "limits"
    path = script(gpus, "show-limits", f"#!/bin/sh\nulimit -v >{seen}\nexit 0\n")
    gpus.sge.set_hooks(f"root@{path}", "NONE")
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "h_vmem=8M"), stdin="true\n")
    gpus.sge.wait_settled(job)
    assert wait_until(lambda: seen.read_text().strip() or None, why="the limits") == "10240"
