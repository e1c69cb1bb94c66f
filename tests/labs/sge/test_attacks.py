# SPDX-License-Identifier: Apache-2.0
"""A user's job attacks a real Grid Engine node: no root, no queue in error, no GPU of another's.

Each test says what the attack was, and what stopped it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    forget_conf,
    gate_file,
    on,
    records,
    restart_execd,
    said,
    script,
    submit_args,
)
from tests.labs.sge.lab import JobId

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE = NODES[0]
SHEPHERD = "prolog/sge_shepherd"
TUNABLES = "glibc.rtld.optional_static_tls=1000000000000"
STATIC_TLS = {"GLIBC_TUNABLES": TUNABLES}
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.mmap_max=0", "MALLOC_CHECK_": "3"}
PYTHON = {"PYTHONHOME": "/no", "PYTHONPATH": "/no", "PYTHONMALLOC": "debug", "PYTHONUTF8": "x"}
SHELL = {"BASH_ENV": "/no", "ENV": "/no", "SHELLOPTS": "xtrace", "PS4": "$(id)", "IFS": "/"}
LOCALE = {"LC_ALL": "../../tmp", "LOCPATH": "/no", "LANG": "\udcff", "GCONV_PATH": "/no"}
LARGE = {f"LARGE{n}": "x" * 9_900 for n in range(120)}  # near what one execve may carry
ENVIRONMENTS = [STATIC_TLS, MALLOC, PYTHON, SHELL, LOCALE, LARGE]
NAMES = ["static tls", "malloc", "python", "shell", "locale", "large"]


@pytest.fixture
def guarded(gpus: Gpulock) -> Iterator[Gpulock]:
    """Start the node's shepherds as `gpulock install sge` has it."""
    restart_execd(gpus, NODE, shepherd_cmd=str(gpus.hooks.folder / SHEPHERD))
    try:
        yield gpus
    finally:
        gpus.sge.clear_jobs()
        forget_conf(gpus, NODE, "shepherd_cmd")


@pytest.fixture
def chained(guarded: Gpulock) -> Gpulock:
    """Let the site have hooks of its own behind ours."""
    for hook in ("prolog", "epilog"):
        words = guarded.line(hook).split()
        clean, job = words[0], words[3:]
        line = [clean, str(guarded.hooks.chain), hook, *job, "$job_owner", "root@/bin/true"]
        guarded.sge.qconf("-rattr", "queue", hook, " ".join(line), "gpu.q")
    return guarded


def submit_with(gpus: Gpulock, env: dict[str, str], *asked: str) -> JobId:
    """Submit a job with an environment that qsub itself is not started with."""
    hidden = [f"-v {name}={env[name]}" for name in env if name == "GLIBC_TUNABLES"]
    shown = {name: value for name, value in env.items() if name != "GLIBC_TUNABLES"}
    words = [*on(NODE, *asked), "-V", *" ".join(hidden).split()]
    return submit_args(gpus, "glalice", [*words, "-b", "y", "/bin/true"], shown)


def settle(gpus: Gpulock, job: JobId) -> str:
    """Wait until a job is over or in error; return its state."""
    return gpus.sge.wait_state(job, "", "Eqw", seconds=90)


def stopped_queues(gpus: Gpulock) -> dict[str, str]:
    """Return the queues of the lab that are in error."""
    return {node: state for node, state in gpus.sge.queue_states().items() if "E" in state}


def root_script(gpus: Gpulock) -> tuple[Path, Path]:
    """Return a program of the attacker's that notes who ran it, and its note."""
    note = gpus.sge.lab / "evil.note"
    note.unlink(missing_ok=True)
    note.touch()
    note.chmod(0o666)
    return script(gpus, "evil.sh", f"#!/bin/sh\nid -un >>{note}\n"), note


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=NAMES)
@pytest.mark.parametrize("asked", [("-l", "gpu=1"), ()], ids=["gpu", "no gpu"])
def test_no_variable_of_a_job_stops_its_queue(
    guarded: Gpulock, env: dict[str, str], asked: tuple[str, ...]
) -> None:
    """The loader reads GLIBC_TUNABLES before any program of ours; `clean` has no loader."""
    job = submit_with(guarded, env, *asked)

    settle(guarded, job)

    assert stopped_queues(guarded) == {}
    guarded.wait_free()


def test_an_environment_too_large_for_a_small_stack_stops_no_queue(guarded: Gpulock) -> None:
    """The kernel starts no program with it, the hook's neither: the job is in error."""
    words = [*on(NODE, "-l", "gpu=1,h_stack=1M"), "-V"]
    for more in (["-b", "y", "/bin/true"], ["-b", "y", "-shell", "n", "/bin/true"]):
        settle(guarded, submit_args(guarded, "glalice", [*words, *more], LARGE))
    path = script(guarded, "plain.sh", "true\n")
    settle(guarded, submit_args(guarded, "glalice", [*words, str(path)], LARGE))

    assert stopped_queues(guarded) == {}


@pytest.mark.parametrize("status", ["7", "8", "13", "15", "24", "36", "x"])
def test_a_job_that_writes_its_exit_status_stops_no_queue(guarded: Gpulock, status: str) -> None:
    """The file is the owner's, and execd believes it; our epilog takes it away."""
    text = f'echo {status} >"$SGE_JOB_SPOOL_DIR/exit_status"\n'
    job = guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)

    assert settle(guarded, job) == "Eqw"
    assert stopped_queues(guarded) == {}


def test_a_job_that_ends_with_99_or_100_is_still_heard(guarded: Gpulock) -> None:
    """The same file carries what a job may say of itself: run me again, I am in error."""
    marker = gate_file(guarded, "again")
    again = f"[ -e {marker} ] && exit 0; touch {marker}; exit 99\n"
    jobs = [
        guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)
        for text in (again, "exit 100\n", "exit 7\n")
    ]
    ended = [settle(guarded, job) for job in jobs]

    assert ended == ["", "Eqw", ""]
    assert [record["failed"].split()[0] for record in records(guarded, jobs[0])] == ["25", "0"]
    assert [record["exit_status"] for record in records(guarded, jobs[2])] == ["7"]


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=NAMES)
def test_no_variable_of_a_job_stops_its_queue_in_front_of_the_sites_hooks(
    chained: Gpulock, env: dict[str, str]
) -> None:
    """The site's root hooks get none of what a loader, a shell or Python obeys."""
    job = submit_with(chained, env, "-l", "gpu=1")

    settle(chained, job)

    assert stopped_queues(chained) == {}
    chained.wait_free()


def test_qalter_forges_no_prolog_that_the_verifier_does_not_see(guarded: Gpulock) -> None:
    """`-M` is in jsv_allowed_mod, so no JSV sees it; shepherd_cmd reads `config` first."""
    evil, note = root_script(guarded)
    guarded.sge.set_conf("jsv_url", str(guarded.hooks.jsv))
    try:
        job = guarded.sge.submit("glalice", *on(NODE), "-h", "-b", "y", "/bin/true")
        for option, value in (("-M", "x"), ("-N", "x"), ("-A", "x"), ("-o", "/tmp/x")):
            text = f"{value}\nprolog=root@{evil}\ny="
            guarded.sge.run_as("glalice", ["/usr/lib/gridengine/qalter", option, text, str(job)])
        guarded.sge.run_as("glalice", ["/usr/lib/gridengine/qalter", "-h", "U", str(job)])
        state = settle(guarded, job)
    finally:
        guarded.sge.set_conf("jsv_url", "none")

    assert note.read_text() == ""
    assert state == "Eqw"
    assert "is not Grid Engine's" in guarded.sge.qstat("-j", str(job))
    assert stopped_queues(guarded) == {}


@pytest.mark.parametrize(
    "forged",
    ["job_owner=root\nmin_uid=0\nmin_gid=0", "add_grp_id=65499", "inherit_env=0"],
)
def test_the_folder_of_a_task_forges_no_owner(guarded: Gpulock, forged: str) -> None:
    """No JSV is asked for a task of `qrsh -inherit`; shepherd_cmd reads its `config` as well."""
    evil, note = root_script(guarded)
    home = guarded.sge.users["glalice"].home
    folder = home / f"w\n{forged}\ny="
    for made in (home / "w", folder):
        made.mkdir(exist_ok=True)
        os.chown(made, 27001, 27001)
    text = f"cd '{folder}' && qrsh -inherit -cwd {NODE} {evil} && echo ran\necho over\n"
    job = guarded.sge.submit("glalice", *on(NODE, "-pe", "smp", "2"), stdin=text)

    settle(guarded, job)  # the whole job goes with its task

    assert "ran" not in said(guarded, job)
    assert note.read_text() == ""
    assert stopped_queues(guarded) == {}


def test_an_argument_with_a_newline_forges_nothing_without_a_verifier(guarded: Gpulock) -> None:
    """Without jsv_url an argument can name another prolog; shepherd_cmd refuses the job."""
    evil, note = root_script(guarded)
    words = [*on(NODE, "-l", "gpu=1"), "-b", "y", "-shell", "n", "/bin/true"]
    job = submit_args(guarded, "glalice", [*words, f"x\nprolog=root@{evil}\ny="], {})

    assert settle(guarded, job) == "Eqw"
    assert note.read_text() == ""
    assert stopped_queues(guarded) == {}
    # the owner may clear the error, and gets the same answer: it does not go round
    guarded.sge.run_as("glalice", ["/usr/lib/gridengine/qmod", "-cj", str(job)])
    assert settle(guarded, job) == "Eqw"
    assert stopped_queues(guarded) == {}


def test_a_full_output_file_ends_no_launcher(guarded: Gpulock) -> None:
    """A message that h_fsize leaves no room for is lost, and its SIGXFSZ with it."""
    home = guarded.sge.users["glalice"].home
    large = home / "large.out"
    large.write_bytes(b"x" * 100_000)
    os.chown(large, 27001, 27001)
    asked = ("-o", str(large), "-l", "gpu=1,h_vmem=1,h_fsize=0")
    job = guarded.sge.submit("glalice", *on(NODE, *asked), stdin="true\n")

    settle(guarded, job)

    assert stopped_queues(guarded) == {}
    guarded.wait_free()


def test_an_ordinary_job_runs_through_all_of_this(guarded: Gpulock) -> None:
    """What stops the attacks stops no honest job: odd bytes, many arguments, an array, a task."""
    odd = [*on(NODE, "-l", "gpu=1"), "-N", "n;x", "-A", "a=b", "-b", "y", "/bin/echo"]
    jobs = [
        submit_args(guarded, "glalice", [*odd, *(f"a={n} *" for n in range(90))], SHELL),
        guarded.sge.submit("glalice", *on(NODE, "-t", "1-2"), stdin="echo ran\n"),
        guarded.sge.submit(
            "glalice",
            *on(NODE, "-pe", "smp", "2"),
            stdin=f"qrsh -inherit {NODE} /bin/echo task ran\n",
        ),
    ]
    for job in jobs:
        guarded.sge.wait_done(job, seconds=90)
        assert [record["failed"].split()[0] for record in records(guarded, job)] in (
            ["0"],
            ["0", "0"],
        )
    assert "task ran" in said(guarded, jobs[2])
