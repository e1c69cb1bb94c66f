# SPDX-License-Identifier: Apache-2.0
"""What a job brings along is never run as root, never believed, and frees nothing of others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from gpulock.job.environment import loaded_driver_version
from tests.labs.common.installed import gate_file, script
from tests.labs.sge.cluster import NODES
from tests.labs.sge.evil import Evil, kit
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    claims,
    forget_conf,
    on,
    restart_execd,
    said,
    stopped_queues,
    submit_args,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import LabError, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE, OTHER, THIRD = NODES
MASK = "CUDA_VISIBLE_DEVICES"
SHEPHERDS_CONFIG_LINE = 99_999  # bytes


@pytest.fixture
def evil(gpus: Gpulock) -> Evil:
    """Give a test a hostile user's kit."""
    return kit(gpus.sge.lab)


@pytest.fixture
def holder(gpus: Gpulock) -> JobId:
    """Let another user hold four GPUs of NODE, 0 to 3."""
    job = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=4"), stdin="sleep 600\n")
    gpus.sge.wait_running(job)
    return job


def environ(gpus: Gpulock, job: JobId, name: str) -> list[tuple[str, str]]:
    """Return what `cat /proc/self/environ` printed, in its order."""
    entries = said(gpus, job, name).split("\0")
    return [(entry.partition("=")[0], entry.partition("=")[2]) for entry in entries if entry]


def show_environ(gpus: Gpulock, evil: Evil, node: str, *more: str) -> list[tuple[str, str]]:
    """Run a job whose program shows its environment, no shell between; all of it hostile."""
    plain = ",".join(f"{name}={value}" for name, value in evil.plain().items())
    words = on(node, *more, "-N", "show", "-V", "-v", plain, "-b", "y", "-shell", "n")
    job = submit_args(gpus, "glalice", [*words, "/bin/cat", "/proc/self/environ"], evil.odd())
    gpus.sge.wait_done(job)
    return environ(gpus, job, "show")


def test_a_hostile_environment_runs_nothing_as_root_and_reads_only_our_mask(
    gpus: Gpulock, evil: Evil, holder: JobId
) -> None:
    """Tried: a whole kit of variables, files and programs, with another job's number and a mask.

    Stopped by: hooks start with no environment, find their job by the shepherd above, and replace
    the mask's line.
    """
    plain = ",".join(f"{name}={value}" for name, value in evil.plain().items())
    plant = (
        f"cp {evil.programs}/* $TMPDIR/\nmkdir $TMPDIR/made\npython3 -c pass\nhash -r\nrmdir /x\n"
    )
    words = [*on(NODE, "-l", "gpu=2"), "-V", "-v", plain, "-N", "plant"]
    path = script(gpus, "plant", f"#!/bin/bash\n{plant}")
    job = submit_args(gpus, "glalice", [*words, str(path)], evil.odd())
    shown = show_environ(gpus, evil, NODE, "-l", "gpu=2")
    gpus.sge.wait_done(job)
    wait_until(
        lambda: set(claims(gpus, NODE)) >= {str(job), str(holder)}, why="both to have claimed"
    )
    assert evil.ran(0) == ""
    by_user = evil.log.read_text()
    for what in ("library", "function", "fake python3", "sitecustomize"):
        assert f"uid=27001 euid=27001 {what}" in by_user  # the kit works: it ran as the user
    masks = [value for name, value in shown if name == MASK]
    assert len(masks) == 1 and set(masks[0].split(",")) <= {"4", "5", "6", "7"}
    ours = {name: value for name, value in shown if "VISIBLE_DEVICES" in name or "SGE_GPU" in name}
    assert len(ours) == 9
    assert all(value == masks[0] or value.startswith("GPU-") for value in ours.values())
    assert dict(shown)["LARGE"].startswith("x" * 9900)  # the shepherd itself keeps no more
    assert ("BYTES", evil.odd()["BYTES"]) in shown
    assert len(gpus.held_by(holder)[NODE]) == 4
    assert gpus.held_by(job)[NODE] == []
    granted = claims(gpus, NODE)
    assert str(job) in granted and "999999" not in granted  # the true job, not the JOB_ID it set
    assert [r["failed"] for r in gpus.sge.records(job)] == ["0"]


def test_a_naive_hook_would_have_run_the_kit_as_root(gpus: Gpulock, evil: Evil) -> None:
    """Tried: the same kit with a hook that keeps its environment: it runs as root, so the kit
    works.

    Stopped by: nothing here; `prolog/drop-env` is what such a hook lacks.
    """
    naive = script(gpus, "naive", "#!/usr/bin/env python3\nimport os\nos.system('mkdir -p /x')\n")
    gpus.sge.set_hooks(f"root@{naive}", "NONE", queues=["cpu.q"])
    plain = ",".join(f"{name}={value}" for name, value in evil.plain().items())
    words = ["-q", "cpu.q", "-l", f"h={THIRD}", "-v", plain]
    job = gpus.sge.submit("glalice", *words, stdin="true\n")
    gpus.sge.wait_settled(job)
    assert "sitecustomize" in evil.ran(0)
    assert "fake mkdir" in evil.ran(0)


@pytest.fixture
def bare(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let jobs of OTHER get both lines of a variable that stands twice."""
    restart_execd(gpus, OTHER, execd_params="INHERIT_ENV=false")
    yield gpus
    gpus.sge.clear_jobs()
    forget_conf(gpus, OTHER, "execd_params")


def test_without_inherit_env_the_first_and_the_last_mask_are_ours(bare: Gpulock) -> None:
    """Tried: a mask of the user's own, where execd hands on both lines of a variable that stands
    twice.

    Stopped by: each such line is replaced, never one appended.
    """
    evil = kit(bare.sge.lab)
    shown = show_environ(bare, evil, OTHER, "-l", "gpu=1")
    masks = [value for name, value in shown if name == MASK]
    assert masks == ["0"]
    assert [value for name, value in shown if name == f"APPTAINERENV_{MASK}"] == ["0"]
    version = loaded_driver_version(str(bare.drivers / OTHER / "proc/driver/nvidia"))
    for part in ("bin", "lib"):
        (bare.sge.lab / "sets" / version / part).mkdir(parents=True, exist_ok=True)
    bare.configure(OTHER, DRIVER_DIR=str(bare.sge.lab / "sets"))
    bound = show_environ(bare, evil, OTHER, "-l", "gpu=1")
    assert [value for name, value in bound if name == MASK] == ["0"]
    binds = {value for name, value in bound if name.endswith("_BINDPATH")}
    assert len(binds) == 1 and all(value.endswith(f"{version}/lib:/nvlib") for value in binds)
    none = show_environ(bare, evil, OTHER)
    assert [value for name, value in none if name == MASK] == [""]
    assert evil.ran(0) == ""


def test_lines_forged_by_newlines_claim_nothing_for_anybody_else(
    gpus: Gpulock, holder: JobId
) -> None:
    """Tried: an argument that forges lines of the shepherd's config: another's group, job, owner,
    queue.

    Stopped by: a hook refuses a key that stands more than once; that job alone goes in error.
    """
    gid = gpus.record_of(NODE, holder).add_grp_id
    forged = {
        f"add_grp_id={gid}": (),
        f"job_id={holder}": (),
        "ja_task_id=5": (),
        "job_owner=glbob": (),
        "queue=cpu.q": (),
        "pe=none": ("-pe", "smp", "2"),
        "host_slots=4": ("-pe", "smp", "2"),
    }
    jobs: dict[str, JobId] = {}
    for line, more in forged.items():
        words = on(NODE, "-l", "gpuj=1", *more, "-N", "forged", "-b", "y", "-shell", "n")
        jobs[line] = submit_args(gpus, "glalice", [*words, "/bin/true", f"x\n{line}"], {})
    # the shepherd itself believes the forged line, and names the output file after it
    files = {f"job_id={holder}": f"forged.o{holder}", "ja_task_id=5": "forged.o{job}.5"}
    home = gpus.sge.users["glalice"].home
    for line, job in jobs.items():
        gpus.sge.wait_state(job, "Eqw")
        key = line.partition("=")[0]
        if key == "job_owner":
            continue  # it is the other user's folder then, where the shepherd may write nothing
        text = (home / files.get(line, "forged.o{job}").format(job=job)).read_text()
        assert f"{key} stands in the shepherd's config more than once" in text
    # a job without GPUs would carry the other's group, and its end would kill the other
    bad = f"add_grp_id={gid}"
    long = "x" * (SHEPHERDS_CONFIG_LINE - len("job_arg1=")) + bad
    words = on(NODE, "-N", "forged", "-b", "y", "-shell", "n", "/bin/true")
    without = [
        submit_args(gpus, "glalice", [*words, argument], {})
        for argument in (f"x\n{bad}", f"x\n={bad}", f"x\n {bad}", f"x\nadd_grp_id {gid}", long)
    ]
    for job in without:
        gpus.sge.wait_state(job, "Eqw")
        assert "add_grp_id stands" in said(gpus, job, "forged")
    assert set(claims(gpus, NODE)) == {str(holder)}
    assert gpus.sge.queue_states()[NODE] == ""
    assert len(gpus.held_by(holder)[NODE]) == 4
    assert gpus.sge.state(holder) == "r"


def test_names_accounts_and_folders_of_odd_bytes_are_served_or_turned_away(
    gpus: Gpulock, holder: JobId
) -> None:
    """Tried: names, accounts and folders of shell words, escape sequences and forged lines.

    Stopped by: no shell reads them, and a key that stands twice is refused.
    """
    gid = gpus.record_of(NODE, holder).add_grp_id
    home = gpus.sge.users["glalice"].home
    odd = home / "odd $(touch x);'\udcff\x1b[31m"
    lines = home / f"w\nadd_grp_id={gid}"
    for folder in (odd, lines):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 27001, 27001)
    wanted: dict[str, tuple[str, ...]] = {
        "folder": ("-wd", str(odd)),
        "folder of lines": ("-wd", str(lines)),
        "name": ("-N", "n$(touch\tx);`'\udcff"),
        "name of lines": ("-N", f"n\nadd_grp_id={gid}"),
        "account": ("-A", "a;$(touch x)'\udcff\x1b"),
        "account of lines": ("-A", f"a\nadd_grp_id={gid}"),
        "output of lines": ("-o", f"{home}/o\nadd_grp_id={gid}"),
        "context of lines": ("-ac", f"k=v\nadd_grp_id={gid}"),
    }
    jobs: dict[str, JobId] = {}
    for what, words in wanted.items():
        try:
            line = ["-b", "y", "-shell", "n", "/bin/true"]
            jobs[what] = submit_args(gpus, "glalice", [*on(NODE, "-l", "gpu=1"), *words, *line], {})
        except LabError as rejected:
            assert re.search("Unable to run job|denied|rejected", str(rejected)), what
    assert "folder" in jobs
    for job in jobs.values():
        gpus.sge.wait_state(job, "", "Eqw")
    states = {what: gpus.sge.state(job) for what, job in jobs.items()}
    assert states["folder"] == "" and str(jobs["folder"]) in claims(gpus, NODE)
    for what, job in jobs.items():
        if what.endswith("of lines") and states[what] == "Eqw":
            assert str(job) not in claims(gpus, NODE)
    assert len(gpus.held_by(holder)[NODE]) == 4
    assert gpus.sge.queue_states()[NODE] == ""


def test_an_epilog_that_runs_twice_does_not_free_who_came_between(gpus: Gpulock) -> None:
    """Tried: an epilog once more, after the GPU has gone to another user's job.

    Stopped by: a release goes by the owner record, with the very run in it, and not by the GPU.
    """
    go = gate_file(gpus, "second")
    twice = script(
        gpus,
        "twice",
        "#!/bin/sh\nexport PATH=/usr/bin:/bin\n"
        f'{gpus.hooks.epilog} "$PPID"\n'
        f"{waiting_for(go)}"
        f'{gpus.hooks.epilog} "$PPID"\necho twice=$?\nexit 0\n',
    )
    line = f"root@{twice}"
    gpus.sge.set_hooks(gpus.line("prolog"), line, queues=["gpu.q"])
    first = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin="true\n")
    wait_until(
        lambda: str(first) in claims(gpus, NODE) and not gpus.locks(NODE), why="a first epilog"
    )
    gpus.sge.set_hooks(gpus.line("prolog"), gpus.line("epilog"), queues=["gpu.q"])
    second = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=1"), stdin="sleep 300\n")
    gpus.sge.wait_running(second)
    assert claims(gpus, NODE)[str(first)] == claims(gpus, NODE)[str(second)]
    go.touch()
    gpus.sge.wait_settled(first)
    assert "twice=0" in said(gpus, first)
    assert len(gpus.held_by(second)[NODE]) == 1
    assert gpus.sge.records(first)[-1]["failed"] == "0"


@pytest.mark.parametrize("status", ["7", "8", "13", "15", "24", "36", "x"])
def test_a_job_that_writes_its_exit_status_stops_no_queue(gpus: Gpulock, status: str) -> None:
    """Tried: the file is the owner's, and execd believes it. Stopped by: our epilog takes it away.

    That is without shepherd_cmd, by which a job cannot even write there.
    """
    text = f'echo {status} >"$SGE_JOB_SPOOL_DIR/exit_status"\n'
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)

    assert gpus.sge.wait_state(job, "", "Eqw") == "Eqw"
    assert stopped_queues(gpus) == {}
