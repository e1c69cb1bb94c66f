# SPDX-License-Identifier: Apache-2.0
"""A user's job attacks a real Grid Engine node: no root, no queue in error, no GPU of another's.

Each test says what the attack was, and what stopped it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.labs.common.installed import gate_file, reap, script
from tests.labs.common.starved import starved
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.install import PROGRAMS
from tests.labs.sge.jobs import full_fifo, on, said, stopped_queues, submit_args, submit_env
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE = NODES[0]
TUNABLES = "glibc.rtld.optional_static_tls=1000000000000"
STATIC_TLS = {"GLIBC_TUNABLES": TUNABLES}
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.mmap_max=0", "MALLOC_CHECK_": "3"}
PYTHON = {"PYTHONHOME": "/no", "PYTHONPATH": "/no", "PYTHONMALLOC": "debug", "PYTHONUTF8": "x"}
SHELL = {"BASH_ENV": "/no", "ENV": "/no", "SHELLOPTS": "xtrace", "PS4": "$(id)", "IFS": "/"}
LOCALE = {"LC_ALL": "../../tmp", "LOCPATH": "/no", "LANG": "\udcff", "GCONV_PATH": "/no"}
LARGE = {f"LARGE{n}": "x" * 9_900 for n in range(120)}  # near what one execve may carry
MANY = {f"SGE_M{number:x}": "" for number in range(5_000)}  # qsub takes the square of their number
ENVIRONMENTS = [STATIC_TLS, MALLOC, PYTHON, SHELL, LOCALE, LARGE]
NAMES = ["static tls", "malloc", "python", "shell", "locale", "large"]


def chain_to(guarded: Gpulock, command: str) -> None:
    """Let the site have hooks of its own behind ours: a command that is given the hook's name."""
    for hook in ("prolog", "epilog"):
        line = f"{guarded.line(hook)} $job_owner {command} {hook}"
        guarded.sge.qconf("-rattr", "queue", hook, line, "gpu.q")


def submit_with(gpus: Gpulock, env: Mapping[str, str], *asked: str) -> JobId:
    """Submit a job with an environment."""
    return submit_env(gpus, "glalice", [*on(NODE, *asked), "-b", "y", "/bin/true"], env)


def settle(gpus: Gpulock, job: JobId) -> str:
    """Wait until a job is over or in error; return its state."""
    return gpus.sge.wait_state(job, "", "Eqw")


def root_script(gpus: Gpulock) -> tuple[Path, Path]:
    """Return a program of the attacker's that notes who ran it, and its note."""
    note = gpus.sge.lab / "evil.note"
    note.unlink(missing_ok=True)
    note.touch()
    note.chmod(0o666)
    return script(gpus, "evil.sh", f"#!/bin/sh\nid -un >>{note}\n"), note


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=NAMES)
@pytest.mark.parametrize("kind", ["gpu", "no gpu", "the site's hooks"])
def test_no_variable_of_a_job_stops_its_queue(
    guarded: Gpulock, env: dict[str, str], kind: str
) -> None:
    """Tried: GLIBC_TUNABLES and others, which a loader reads before any program of ours.

    Stopped by: `prolog/drop-env` has no loader, and drops the environment; a root hook of the
    site's behind ours gets none that a loader, a shell or Python obeys.
    """
    if kind == "the site's hooks":
        chain_to(guarded, "root@/bin/true")
    job = submit_with(guarded, env, *(() if kind == "no gpu" else ("-l", "gpu=1")))

    settle(guarded, job)

    assert stopped_queues(guarded) == {}
    guarded.wait_free()


def test_an_environment_too_large_for_a_small_stack_stops_no_queue(guarded: Gpulock) -> None:
    """Tried: an environment too large for a small stack: the kernel starts no program with it.

    Stopped by: the job is in error, and the queue stays.
    """
    words = [*on(NODE, "-l", "gpu=1,h_stack=1M"), "-V"]
    for more in (["-b", "y", "/bin/true"], ["-b", "y", "-shell", "n", "/bin/true"]):
        settle(guarded, submit_args(guarded, "glalice", [*words, *more], LARGE))
    path = script(guarded, "plain.sh", "true\n")
    settle(guarded, submit_args(guarded, "glalice", [*words, str(path)], LARGE))

    assert stopped_queues(guarded) == {}


@pytest.mark.parametrize("env", [LARGE, STATIC_TLS, MANY], ids=["large", "static tls", "many"])
def test_no_variable_stops_a_queue_under_a_small_limit(
    guarded: Gpulock, env: dict[str, str]
) -> None:
    """Tried: large variables under small limits, which the shepherd's fork reads first.

    Stopped by: a fork that ends before it is a hook costs its own job alone.
    """
    tight = ("h_vmem=1", "h_data=1", "h_stack=1", "h_cpu=1", "h_fsize=0", "h_vmem=4M", "h_data=4M")
    for limits in (*tight, "h_vmem=10M", "h_vmem=20M", ",".join(tight[:5])):
        settle(guarded, submit_with(guarded, env, "-l", f"gpu=1,{limits}"))

        assert stopped_queues(guarded) == {}, limits
    guarded.wait_free()


@pytest.mark.parametrize("status", ["7", "8", "36", "x"])
def test_a_job_cannot_write_its_exit_status(guarded: Gpulock, status: str) -> None:
    """Tried: the file that execd believes. Stopped by: shepherd_cmd makes it, so it stays execd's.

    Where no shepherd_cmd is set the epilog takes it from the owner (test_hostile.py).
    """
    text = f'echo {status} >"$SGE_JOB_SPOOL_DIR/exit_status" || echo denied\n'
    job = guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)

    assert settle(guarded, job) == ""
    assert "denied" in said(guarded, job)
    assert guarded.sge.records(job)[-1]["failed"] == "0"
    assert stopped_queues(guarded) == {}


def test_a_job_that_ends_with_99_or_100_is_still_heard(guarded: Gpulock) -> None:
    """Tried: to end with 99 or 100, which a job may: run me again, I am in error.

    Stopped by: nothing; `sge_shepherd` passes on what a job may say of itself.
    """
    marker = gate_file(guarded, "again")
    again = f"[ -e {marker} ] && exit 0; touch {marker}; exit 99\n"
    jobs = [
        guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)
        for text in (again, "exit 100\n", "exit 7\n")
    ]
    ended = [settle(guarded, job) for job in jobs]

    assert ended == ["", "Eqw", ""]
    wait_until(lambda: len(guarded.sge.records(jobs[0])) > 1, why="both records of the first job")
    assert [record["failed"].split()[0] for record in guarded.sge.records(jobs[0])] == ["25", "0"]
    assert [record["exit_status"] for record in guarded.sge.records(jobs[2])] == ["7"]


def test_no_variable_runs_a_users_program_in_the_sites_hooks(guarded: Gpulock) -> None:
    """Tried: a PATH, a start file, a module for a hook of root's that runs programs by their names.

    Stopped by: our hook gives it a PATH of root's, and only what execd writes itself.
    """
    evil, note = root_script(guarded)
    seen = guarded.sge.lab / "seen"
    hook = script(guarded, "hook", f"#!/bin/sh\nnvidia-smi\nid\nenv >{seen}.$1\nexit 0\n")
    chain_to(guarded, f"root@{hook}")
    home = guarded.sge.users["glalice"].home
    for name in ("nvidia-smi", "id", "env"):
        (home / name).unlink(missing_ok=True)
        (home / name).symlink_to(evil)
    given = f"PATH={home},PERL5OPT=-MEvil,SGE_QMASTER_PORT=1,CUDA_VISIBLE_DEVICES=7"
    words = [*on(NODE, "-l", "gpu=1"), "-V", "-v", given, "-b", "y", "/bin/true"]
    for env, state in (({}, ""), ({"X\nSGE_ROOT": str(home)}, "Eqw")):
        job = submit_args(guarded, "glalice", words, env)

        assert settle(guarded, job) == state
        assert note.read_text() == ""
        assert stopped_queues(guarded) == {}
    for kind in ("prolog", "epilog"):
        told = dict(line.split("=", 1) for line in Path(f"{seen}.{kind}").read_text().splitlines())
        assert told["USER"] == "glalice"
        assert told["SGE_ROOT"] == guarded.sge.env["SGE_ROOT"]
        assert told["CUDA_VISIBLE_DEVICES"].isdigit()
        assert not {"HOME", "SHELL", "TMPDIR", "PERL5OPT", "SGE_QMASTER_PORT"} & set(told)


def test_no_length_of_a_request_ends_qmaster(guarded: Gpulock) -> None:
    """Tried: a request of 80,000 digits. Stopped by: qmaster keeps a number, which is refused."""
    sge, before = guarded.sge, guarded.sge.qmaster_pid()
    asked = on(NODE, "-l", f"gpu=1.{'5' * 80_000}")
    job = sge.submit("glalice", *asked, "-b", "y", "/bin/true")

    assert settle(guarded, job) == "Eqw"
    assert "1.55556 is no number of GPUs" in said(guarded, job, "true")
    assert sge.qmaster_pid() == before


@pytest.mark.parametrize("forged", ["prolog=root@{evil}", "add_grp_id=0"])
def test_qalter_forges_nothing(guarded: Gpulock, forged: str) -> None:
    """Tried: a root prolog, a job without its group, in what is changed after submission.

    Stopped by: shepherd_cmd reads `config` first.
    """
    evil, note = root_script(guarded)
    job = guarded.sge.submit("glalice", *on(NODE), "-h", "-b", "y", "/bin/true")
    for option, value in (("-M", "x"), ("-N", "x"), ("-A", "x"), ("-o", "/tmp/x")):
        text = f"{value}\n{forged.format(evil=evil)}\ny="
        guarded.sge.run_as("glalice", [str(PROGRAMS / "qalter"), option, text, str(job)])
    guarded.sge.run_as("glalice", [str(PROGRAMS / "qalter"), "-h", "U", str(job)])
    state = settle(guarded, job)

    assert note.read_text() == ""
    assert state == "Eqw"
    assert "is not Grid Engine's" in guarded.sge.qstat("-j", str(job))
    assert stopped_queues(guarded) == {}


def accounted(gpus: Gpulock, name: str) -> str:
    """Return what the accounting file says of the jobs of a name, once it says how one ended."""

    def look() -> str | None:
        text = gpus.sge.client("qacct", "-j", name, check=False).stdout
        return text if re.search(r"(?m)^failed ", text) else None

    return wait_until(look, why=f"{name} in accounting")


def test_a_patched_client_forges_no_prolog_in_a_variable(guarded: Gpulock) -> None:
    """Tried: QRSH_PORT with a newline; qrsh sets its own port.

    A copy of qrsh with another name in it leaves the user's. Stopped by: shepherd_cmd.
    """
    evil, note = root_script(guarded)
    client = script(guarded, "qrsh", "")
    real = (PROGRAMS / "qrsh").read_bytes()
    assert real.count(b"QRSH_PORT\0") == 1
    client.write_bytes(real.replace(b"QRSH_PORT\0", b"QRSX_PORT\0"))
    port = f"QRSH_PORT=glmaster:1\nprolog=root@{evil}\nzz="
    words = ["-pty", "no", "-N", "patched", *on(NODE), "-v", port, "/bin/true"]
    guarded.sge.run_as("glalice", ["timeout", "-s", "KILL", "15", str(client), *words])
    shown = accounted(guarded, "patched")

    assert note.read_text() == ""
    assert re.search(r"(?m)^failed +30 ", shown), shown
    assert stopped_queues(guarded) == {}


def test_a_display_forges_no_prolog(guarded: Gpulock) -> None:
    """Tried: DISPLAY of a qsh with a newline. Stopped by: shepherd_cmd."""
    evil, note = root_script(guarded)
    display = f"DISPLAY=glmaster:1\nprolog=root@{evil}\nzz="
    words = ["-now", "no", "-N", "shown", *on(NODE), "-v", display]
    line = ["timeout", "-s", "KILL", "15", str(PROGRAMS / "qsh"), *words]
    guarded.sge.run_as("glalice", line)
    shown = accounted(guarded, "shown")

    assert note.read_text() == ""
    assert re.search(r"(?m)^failed +30 ", shown), shown
    assert stopped_queues(guarded) == {}


@pytest.mark.parametrize(
    "forged",
    ["job_owner=root\nmin_uid=0\nmin_gid=0", "add_grp_id=65499", "inherit_env=0"],
)
def test_the_folder_of_a_task_forges_no_owner(guarded: Gpulock, forged: str) -> None:
    """Tried: a folder's name that forges an owner, for a task of `qrsh -inherit`.

    Stopped by: shepherd_cmd reads its `config` as well, and refuses it.
    """
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


FORGED = "x\nprolog=root@{evil}\ny="
PLAIN = ("-b", "y", "/bin/true")
ARGUMENT = ("-b", "y", "-shell", "n", "/bin/true")
WORDS: dict[str, tuple[str, ...]] = {
    "-M": ("-M", FORGED, *PLAIN),
    "-M host": ("-M", f"user@{FORGED}", *PLAIN),
    "-o": ("-o", f"{{home}}/{FORGED}", *PLAIN),
    "-e": ("-e", f"{{home}}/{FORGED}", *PLAIN),
    "-i": ("-i", f"{{home}}/{FORGED}", *PLAIN),
    "-wd": ("-wd", f"{{home}}/{FORGED}", *PLAIN),
    "-S": ("-S", "/bin/sh\nprolog=root@{evil}\ny=", *PLAIN),
    "argument": (*ARGUMENT, FORGED),
    # each put queues in error: the rest of `config` hidden, another host's queue, half a feature
    "blanks": (*ARGUMENT, "x\n" + " " * 99_999),
    "another host": (*ARGUMENT, f"x\nqueue=gpu.q\nhost={NODES[1]}\nprolog=/bin/false\ny="),
    "checkpoint": (*ARGUMENT, "x\nckpt_job=1"),
    "method": (*ARGUMENT, "x\nsuspend_method=relative"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_no_word_of_a_job_forges_a_prolog(guarded: Gpulock, kind: str) -> None:
    """Tried: a newline in each option or argument whose text stands in `config`.

    Stopped by: shepherd_cmd refuses the job, and execd reads no such config either.
    """
    evil, note = root_script(guarded)
    home = guarded.sge.users["glalice"].home
    words = [word.format(home=home, evil=evil) for word in WORDS[kind]]
    if kind == "-wd":
        Path(words[1]).mkdir(parents=True, exist_ok=True)
    queue = ("-q", "gpu.q", "-l", f"h={NODE},gpu=1")
    job = submit_args(guarded, "glalice", [*queue, *words], {})

    assert settle(guarded, job) == "Eqw"
    if kind == "argument":  # the owner may clear the error, and gets the same answer
        guarded.sge.run_as("glalice", [str(PROGRAMS / "qmod"), "-cj", str(job)])
        assert settle(guarded, job) == "Eqw"
    assert note.read_text() == ""
    assert stopped_queues(guarded) == {}


@pytest.mark.parametrize("asked", ["gpu=1", "gpu=1,gpuj=1"], ids=["runs", "refused"])
def test_another_job_that_writes_exit_status_stops_no_queue(guarded: Gpulock, asked: str) -> None:
    """Tried: while a job's hooks run, another job of its owner writes 7 into its `exit_status`.

    Stopped by: shepherd_cmd makes the file, so that it is never the owner's.
    """
    stop, told = gate_file(guarded, "stop"), gate_file(guarded, "told")
    write = "for f in */exit_status; do echo 7 >$f; done"
    text = f'cd "$SGE_JOB_SPOOL_DIR/.."\ntouch {told}\nuntil [ -e {stop} ]; do {write}; done 2>&-\n'
    writer = guarded.sge.submit("glalice", *on(NODE), stdin=text)
    wait_until(told.exists, why="the writer to write")
    for _ in range(4):
        job = guarded.sge.submit("glalice", *on(NODE, "-l", asked), stdin="true\n")
        guarded.sge.wait_state(job, "", "Eqw", "Rq")
        assert stopped_queues(guarded) == {}
    stop.touch()
    settle(guarded, writer)
    assert stopped_queues(guarded) == {}


def test_an_output_file_that_is_a_full_pipe_stops_no_queue(guarded: Gpulock) -> None:
    """Tried: a request that is refused, and nobody reads the refusal from a full FIFO.

    The shepherd kills a hook that waits for two minutes. Stopped by: no hook waits to be read.
    """
    with full_fifo(guarded.sge.users["glalice"].home / "full") as fifo:
        asked = ("-l", "gpu=1,gpuj=1", "-o", str(fifo))
        job = guarded.sge.submit("glalice", *on(NODE, *asked), stdin="true\n")

        assert settle(guarded, job) == "Eqw"
    assert stopped_queues(guarded) == {}


def test_a_full_output_file_ends_no_launcher(guarded: Gpulock) -> None:
    """Tried: `h_fsize` and an output file without room for a hook's message, which ends in SIGXFSZ.

    Stopped by: the launcher ignores that signal; the message is lost, the exit code is not.
    """
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
    """Tried: nothing: odd bytes, many arguments, an array and a task of an honest user.

    Stopped by: nothing; what stops the attacks stops no honest job.
    """
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
        guarded.sge.wait_settled(job)
        assert [record["failed"].split()[0] for record in guarded.sge.records(job)] in (
            ["0"],
            ["0", "0"],
        )
    assert "task ran" in said(guarded, jobs[2])


def test_a_job_that_cannot_start_still_says_why(guarded: Gpulock) -> None:
    """Tried: nothing; a job cannot start, and the file that says why is `sge_shepherd`'s.

    Stopped by: nothing; what the shepherd itself writes there counts.
    """
    home = guarded.sge.users["glalice"].home
    asked: dict[str, tuple[str, ...]] = {
        "26": ("-o", f"{home}/no/such/folder/out", "-b", "y", "/bin/true"),
        "27": ("-b", "y", "-shell", "n", "/no/such/program"),
        "28": ("-wd", "/no/such/folder", "-b", "y", "/bin/true"),
    }
    jobs = {
        code: guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1", *words))
        for code, words in asked.items()
    }
    ended = {code: settle(guarded, job) for code, job in jobs.items()}

    assert ended == dict.fromkeys(jobs, "Eqw")
    for code, job in jobs.items():
        assert [record["failed"].split()[0] for record in guarded.sge.records(job)] == [code]
    guarded.wait_free()


@pytest.mark.parametrize("size", ["h_fsize=0", "s_fsize=0", "h_fsize=1M"])
def test_a_trace_that_a_limit_of_file_sizes_ends_stops_no_queue(
    guarded: Gpulock, size: str
) -> None:
    """Tried: to fill `trace` up to h_fsize, so that the shepherd's fork dies before it is a hook.

    Stopped by: shepherd_cmd makes a trace that no limit of file sizes is for.
    """
    text = 'for i in 1 2 3 4; do head -c 1000000 /dev/zero >>"$SGE_JOB_SPOOL_DIR/trace"; done\n'
    job = guarded.sge.submit("glalice", *on(NODE, "-l", f"gpu=1,{size}"), stdin=text)

    assert settle(guarded, job) == ""
    assert stopped_queues(guarded) == {}
    guarded.wait_free()


@pytest.fixture
def limited(guarded: Gpulock) -> Iterator[Gpulock]:
    """Give the queue a limit of file sizes that no job reaches."""
    guarded.sge.qconf("-rattr", "queue", "h_fsize", "1000G", "gpu.q")
    yield guarded
    guarded.sge.qconf("-rattr", "queue", "h_fsize", "INFINITY", "gpu.q")


def test_a_job_of_a_queue_with_a_file_size_limit_fills_no_spool_by_its_trace(
    limited: Gpulock,
) -> None:
    """Tried: to fill execd's spool through `trace`, so that other jobs' shepherds end with 11.

    Stopped by: a queue's h_fsize, as docs/security.md advises: shepherd_cmd makes it a device.
    """
    text = "trace=$SGE_JOB_SPOOL_DIR/trace\nhead -c 50M /dev/zero >>$trace\nstat -c %F:%b $trace\n"
    job = limited.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)

    assert settle(limited, job) == ""
    assert said(limited, job) == "character special file:0\n"
    assert stopped_queues(limited) == {}


@pytest.mark.parametrize("more", [0, 1], ids=["the shepherd's", "its epilog's"])
def test_a_fork_that_fails_at_the_end_of_a_job_stops_no_queue(guarded: Gpulock, more: int) -> None:
    """Tried: a user takes every process of the node. Stopped by: an epilog that cannot start ends
    with 0, and the GPU stays locked until it is reaped.
    """
    gate, told = gate_file(guarded, "gate"), gate_file(guarded, "told")
    text = f"touch {told}\nuntil [ -e {gate} ]; do sleep 0.1; done\n"
    job = guarded.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)
    wait_until(told.exists, why="the job to run")
    with starved("gpulock-lab-starved", guarded.sge.shepherd_pid(job), more):
        gate.touch()
        assert settle(guarded, job) == ""
    assert stopped_queues(guarded) == {}
    assert ("no process can be started" in said(guarded, job)) == (more > 0)
    assert len(guarded.held_by(job)[NODE]) == 1
    reap(guarded, NODE)
    guarded.wait_free()
