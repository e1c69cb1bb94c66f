# SPDX-License-Identifier: Apache-2.0
"""What a job brings along is never run as root, never believed, and frees nothing of others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    wait_refused,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import LabError, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE, OTHER, THIRD = NODES
MASK = "CUDA_VISIBLE_DEVICES"
SHEPHERDS_CONFIG_LINE = 99_999  # bytes
NOTHING: Mapping[str, str] = {}


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


def hook_line(gpus: Gpulock, job: object, hook: Path, env: Mapping[str, str] = NOTHING) -> str:
    """Return the shell line of a queue's hook, with more in its environment."""
    more = " ".join(f"{name}={value}" for name, value in env.items())
    return f"/usr/bin/env -i {more} {gpus.hooks.drop_env} {hook} {job} 0 gpu.q"


def stand_in(gpus: Gpulock, job: object, line: str, config: str, mode: int = 0o755) -> str:
    """Run a line below a process that looks like a shepherd of `job`; return what it printed."""
    program = script(gpus, "sge_shepherd", "")
    shutil.copy("/bin/dash", program)
    spool = gpus.sge.lab / f"stand-in.{job}"
    spool.mkdir(exist_ok=True)
    spool.chmod(mode)
    (spool / "config").write_text(config)
    (spool / "environment").write_text("HOME=/\n")
    done = gpus.sge.run_in(NODE, [str(program), "-c", f"cd {spool}; {line}; echo code=$?"])
    return done.stdout + done.stderr


def test_an_epilog_started_by_anything_but_that_very_shepherd_frees_nothing(
    gpus: Gpulock, holder: JobId
) -> None:
    """Tried: a hook below a process that looks like a shepherd, with another's job in config and
    argv.

    Stopped by: the shepherd above must be that very one: name, real uid, start time, its own
    folder.
    """
    config = (gpus.sge.spool_dir(holder) / "config").read_text(errors="surrogateescape")
    devices = {MASK: "0,1,2,3", "GPULOCK_DEVICES": "all", "SGE_GPU": "0"}
    again = hook_line(gpus, holder, gpus.hooks.epilog, devices)
    told = {
        "another run": stand_in(gpus, holder, again, config),
        "another job": stand_in(
            gpus,
            999,
            hook_line(gpus, 999, gpus.hooks.epilog),
            config.replace(f"job_id={holder}", "job_id=999"),
        ),
        "argument lies": stand_in(gpus, holder, hook_line(gpus, 999, gpus.hooks.epilog), config),
        "open folder": stand_in(gpus, holder, again, config, 0o777),
        "no shepherd": gpus.sge.run_in(NODE, ["sh", "-c", f"{again}; echo code=$?"]).stdout,
    }
    assert {what: "code=0" in text for what, text in told.items()} == dict.fromkeys(told, True)
    assert len(gpus.held_by(holder)[NODE]) == 4
    assert all(not record.draining for record in gpus.locks(NODE).values())
    prolog = hook_line(gpus, 999, gpus.hooks.prolog)
    assert "code=100" in stand_in(gpus, holder, prolog, config)
    assert "code=1\n" in gpus.sge.run_in(NODE, ["sh", "-c", f"{prolog}; echo code=$?"]).stdout
    assert len(gpus.locks(NODE)) == 4


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


def test_epilogs_without_a_prolog_or_after_one_that_failed_end_well(
    gpus: Gpulock, holder: JobId
) -> None:
    """Tried: jobs with an epilog and no claim, beside another user's job.

    Stopped by: an epilog frees what the record says is its job's, and ends with 0.
    """
    gpus.sge.set_hooks("NONE", gpus.line("epilog"), queues=["cpu.q"])
    words = ("-j", "y", "-q", "cpu.q", "-l", f"h={NODE},gpu=1")
    without = gpus.sge.submit("glalice", *words, stdin="true\n")
    invalid = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1.5"), stdin="true\n")
    gpus.sge.wait_done(without)
    gpus.sge.wait_state(invalid, "Eqw")
    assert [r["failed"] for r in gpus.sge.records(without)] == ["0"]
    assert stopped_queues(gpus) == {}
    assert len(gpus.held_by(holder)[NODE]) == 4 == len(gpus.locks(NODE))


PLANT = """#!/bin/sh
export PATH=/usr/bin:/bin
cd -P /proc/$PPID/cwd
echo untouched >{victims}/$JOB_NAME
case $JOB_NAME in
*_link) mv ${{JOB_NAME%_link}} kept; ln -s {victims}/$JOB_NAME ${{JOB_NAME%_link}} ;;
*_fifo) mv ${{JOB_NAME%_fifo}} kept; mkfifo ${{JOB_NAME%_fifo}} ;;
*_folder) mv ${{JOB_NAME%_folder}} kept; mkdir ${{JOB_NAME%_folder}} ;;
esac
{prolog} "$PPID"
echo code=$?
name=${{JOB_NAME%_*}}
[ ! -e kept ] || {{ rm -rf "$name"; mv kept "$name"; }}
[ ! -d gpulock ] || rmdir gpulock
"""


def test_links_and_fifos_in_the_spool_directory_are_refused_or_replaced_in_time(
    gpus: Gpulock,
) -> None:
    """Tried: links, FIFOs and folders in the spool directory, which root alone could plant.

    Stopped by: O_NOFOLLOW, O_NONBLOCK, regular files alone, and a rename: nothing is written
    elsewhere.
    """
    victims = gpus.sge.lab / "victims"
    victims.mkdir(exist_ok=True)
    plant = script(gpus, "plant", PLANT.format(victims=victims, prolog=gpus.hooks.prolog))
    gpus.sge.set_hooks(
        f"root@/usr/bin/env -i JOB_ID=$job_id SGE_TASK_ID=$ja_task_id JOB_NAME=$job_name {plant}",
        gpus.line("epilog"),
    )
    wanted = {
        "environment_link": "1",
        "environment_fifo": "1",
        "environment_folder": "1",
        "config_link": "99",
        "config_fifo": "99",
        "gpulock_link": "0",
        "gpulock_fifo": "0",
        "gpulock_folder": "1",
    }
    jobs = {
        name: gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), "-N", name, stdin="true\n")
        for name in wanted
    }
    for name, job in jobs.items():
        gpus.sge.wait_settled(job)
        assert f"code={wanted[name]}\n" in said(gpus, job, name), name
        assert (victims / name).read_text() == "untouched\n"
    gpus.wait_free()


def test_a_gate_that_is_no_private_file_stops_the_queue_and_a_planted_record_is_held(
    gpus: Gpulock,
) -> None:
    """Tried: links and FIFOs in LOCK_DIR: the gate, events, owner records, the boot id.

    Stopped by: what is no regular file of root's is not followed, and a lock in doubt is held.
    """
    victim = gpus.sge.lab / "victim"
    victim.write_text("untouched\n")
    first = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin="true\n")
    other = gpus.sge.submit("glalice", *on(OTHER, "-l", "gpu=1"), stdin="true\n")
    third = gpus.sge.submit("glalice", *on(THIRD, "-l", "gpu=1"), stdin="true\n")
    for job in (first, other, third):
        gpus.sge.wait_done(job)
    lock_dir = gpus.sge.path_in(NODE, "/run/gpulock")
    (lock_dir / "events").unlink(missing_ok=True)
    (lock_dir / "events").symlink_to(victim)
    for place in sorted((gpus.drivers / NODE / "proc/driver/nvidia/gpus").iterdir())[:2]:
        (lock_dir / "locks" / place.name).mkdir()
        os.mkfifo(lock_dir / "locks" / place.name / "owner")
    gate = gpus.sge.path_in(OTHER, "/run/gpulock.claims/gate")
    gate.unlink()
    os.mkfifo(gate, 0o600)
    boot_id = gpus.sge.path_in(THIRD, "/run/gpulock.claims/boot_id")
    text = boot_id.read_text()
    boot_id.unlink()
    elsewhere = gpus.sge.lab / "elsewhere"
    elsewhere.write_text(text)
    boot_id.symlink_to(elsewhere)
    served = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=6"), stdin=f"echo mask=${MASK}\n")
    stopped = gpus.sge.submit("glalice", *on(OTHER, "-l", "gpu=1"), stdin="true\n")
    doubted = gpus.sge.submit("glalice", *on(THIRD, "-l", "gpu=1"), stdin="true\n")
    gpus.sge.wait_settled(served)
    assert "mask=2,3,4,5,6,7" in said(gpus, served)
    assert victim.read_text() == "untouched\n"
    wait_refused(gpus, OTHER, stopped)
    assert "gate is not a private file" in said(gpus, stopped)
    gpus.sge.wait_state(doubted, "Rq")
    assert "boot_id" in said(gpus, doubted)
    assert not gpus.locks(OTHER) and not gpus.locks(THIRD)
    for entry in (lock_dir / "locks").iterdir():
        shutil.rmtree(entry)


@pytest.mark.parametrize("status", ["7", "8", "13", "15", "24", "36", "x"])
def test_a_job_that_writes_its_exit_status_stops_no_queue(gpus: Gpulock, status: str) -> None:
    """Tried: the file is the owner's, and execd believes it. Stopped by: our epilog takes it away.

    That is without shepherd_cmd, by which a job cannot even write there.
    """
    text = f'echo {status} >"$SGE_JOB_SPOOL_DIR/exit_status"\n'
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=text)

    assert gpus.sge.wait_state(job, "", "Eqw") == "Eqw"
    assert stopped_queues(gpus) == {}
