# SPDX-License-Identifier: Apache-2.0
"""What a Slurm job brings along is never run as root, never believed, and frees nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.labs.common.installed import gate_file, reap, script
from tests.labs.common.processes import end
from tests.labs.slurm.evil import FORGED, Evil, kit, submit
from tests.labs.slurm.gpulock import CONFIG, Gpulock
from tests.labs.slurm.hooks import Stops
from tests.labs.slurm.jobs import (
    ALL,
    SHOW_MASK,
    held,
    impatient,
    is_reaped,
    kill_steps,
    notes,
    occupied,
    started,
    wait_requeued,
)
from tests.labs.slurm.lab import STARTED, JobId
from tests.labs.slurm.modes import NODE, SLURM_CONF, Mode, by_gpulock, by_slurm, wait_said
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
EXTRA = {**SLURM_CONF, "KillWait": "1"}
MASK = "CUDA_VISIBLE_DEVICES"
UUIDS = ("NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
ALICE = 27011
# the script is no shell: it shows what the kernel gave it, every variable as often as it stands
SHOW_ENVIRON = "#!/bin/cat /proc/self/environ\n"


@pytest.fixture
def evil(slurm_gpus: Gpulock) -> Evil:
    """Give a test a hostile user's kit."""
    return kit(slurm_gpus)


def environ(text: str) -> list[tuple[str, str]]:
    """Return what `cat /proc/self/environ` printed, in its order."""
    pairs = [entry.partition("=") for entry in text.split("\0")]
    return [(name, value) for name, equals, value in pairs if equals]


def mask_of(shown: list[tuple[str, str]]) -> list[str]:
    """Return the indexes that a job sees; each variable stands once, and all agree."""
    twins = ("", "APPTAINERENV_", "SINGULARITYENV_")
    found: dict[str, list[str]] = {twin + name: [] for twin in twins for name in (MASK, *UUIDS)}
    for name, value in shown:
        if name in found:
            found[name].append(value)
    first = found[MASK]
    assert len(first) == 1
    mask = first[0].split(",") if first[0] else []
    for name, values in found.items():
        if MASK in name:
            assert values == first, name
        elif mask:
            assert len(values) == 1 and values[0].count("GPU-") == len(mask), name
        else:
            assert values in ([], [""], ["void"]), name
    return mask


@BOTH
def test_a_hostile_environment_runs_nothing_as_root_and_forges_no_mask(
    slurm_gpus: Gpulock, evil: Evil, mode: Mode
) -> None:
    """Tried: a whole kit of variables, files and programs, with forged variables of Slurm's.

    Stopped by: hooks of root's have slurmd's environment alone; a TaskProlog sets each mask itself.
    """
    mode(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    other = slurm.submit("slbob", "-w", NODE, "--gres=gpu:1", script="exec sleep 600\n")
    slurm.wait_running(other)
    word = f"SLURM_CONF={evil.folder}/slurm.conf,LD_PRELOAD={evil.folder}/evil.so"
    words = ["-w", NODE, "--gres=gpu:2", f"--export=ALL,{word}", "--requeue"]
    job = submit(slurm_gpus, "slalice", words, evil.variables(), SHOW_ENVIRON)
    assert slurm.wait_done(job) == "COMPLETED"
    shown = environ(slurm.said(job))
    assert dict(shown)["LARGE"] == "x" * 100_000  # the whole environment travelled
    mask = mask_of(shown)
    assert len(mask) == 2 and "0" not in mask
    # a step, of whose environment the script decides
    lines = "".join(f"export {name}={value}\n" for name, value in FORGED.items())
    text = (
        f"#!/bin/bash\n{lines}srun /bin/cat /proc/self/environ\necho shown\nexec /bin/sleep 600\n"
    )
    second = submit(slurm_gpus, "slalice", words, evil.variables(), text)
    assert mask_of(environ(wait_said(slurm_gpus, second, "shown\n"))) == mask
    records = slurm_gpus.locks(NODE).values()
    assert {r.job_id: (r.uid, r.user, r.slurmd, r.restart) for r in records} == {
        str(other): (27012, "slbob", NODE, 0),
        str(second): (ALICE, "slalice", NODE, 0),
    }
    slurm.scancel(second)
    slurm.wait_settled(second)
    assert evil.ran(0) == ""
    by_user = evil.ran(ALICE)
    assert "library" in by_user and "rc" in by_user  # the kit works: it ran as the user
    assert slurm_gpus.locks(NODE).keys() == set(slurm_gpus.held_by(other)[NODE])
    assert not slurm.is_out(NODE)


@BOTH
@pytest.mark.parametrize("export", ["NONE", "SLURM_JOB_GPUS=0"])
def test_a_job_without_its_submitters_environment_is_masked_too(
    slurm_gpus: Gpulock, evil: Evil, mode: Mode, export: str
) -> None:
    """Tried: a login file that sets the mask; slurmd runs it, as the user.

    Stopped by: slurmstepd obeys the TaskProlog behind it.
    """
    mode(slurm_gpus, extra=EXTRA)
    profile = slurm_gpus.slurm.users["slalice"].home / ".bash_profile"
    profile.write_text(f". {evil.folder}/rc\nexport {MASK}=0,1,2,3\n")
    try:
        words = ["-w", NODE, "--gres=gpu:2", f"--export={export}"]
        job = submit(slurm_gpus, "slalice", words, {}, SHOW_ENVIRON)
        assert slurm_gpus.slurm.wait_done(job) == "COMPLETED"
    finally:
        profile.unlink()
    assert mask_of(environ(slurm_gpus.slurm.said(job))) == ["0", "1"]
    assert evil.ran(0) == ""


@BOTH
def test_a_job_without_gpus_forges_itself_none(slurm_gpus: Gpulock, evil: Evil, mode: Mode) -> None:
    """Tried: a job without GPUs says that it has some, in its script and in its step.

    Stopped by: the note of root's decides, and a step that contradicts it does not start.
    """
    mode(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    words = ["-w", NODE, f"--export=ALL,{MASK}=0"]
    job = submit(slurm_gpus, "slalice", words, {**evil.variables(), **FORGED}, SHOW_ENVIRON)
    assert slurm.wait_settled(job) == "COMPLETED"
    assert mask_of(environ(slurm.said(job))) == []
    lines = "".join(f"export {name}={value}\n" for name, value in FORGED.items())
    text = f"#!/bin/bash\n{lines}export {MASK}=0\nsrun /bin/cat /proc/self/environ\n"
    step = submit(slurm_gpus, "slalice", ["-w", NODE], {}, text)
    slurm.wait_done(step)
    said = slurm.said(step)
    # a step that says it has GPUs of which the node knows nothing may be stopped as well
    assert "this node has no claim" in said or mask_of(environ(said)) == []
    assert slurm_gpus.locks(NODE) == {}


def test_limits_of_the_submitter_starve_no_hook(slurm_gpus: Gpulock) -> None:
    """Tried: `ulimit -v -n -f -t` of the submitter, which Slurm propagates to the job.

    Stopped by: slurmd gives them to the tasks alone.
    """
    by_gpulock(slurm_gpus, extra=EXTRA)
    limits = "ulimit -v 400000; ulimit -n 30; ulimit -f 64; ulimit -t 20; "
    line = f"{limits}exec sbatch --parsable --propagate=ALL -o out.%j -w {NODE} --gres=gpu:2"
    text = f"#!/bin/bash\nulimit -n -f\n{SHOW_MASK}"
    done = slurm_gpus.slurm.run_as("slalice", ["/bin/bash", "-c", line], stdin=text)
    job = JobId(int(done.stdout))
    assert slurm_gpus.slurm.wait_done(job) == "COMPLETED"
    said = slurm_gpus.slurm.said(job)
    assert " 30\n" in said and "mask=0,1.\n" in said
    assert slurm_gpus.locks(NODE) == {}


# --- what slurmctld is asked ----------------------------------------------------------------------


def rows(job: JobId, uid: int, state: str) -> str:
    """Return a text that looks like squeue's answer, and like scontrol's."""
    columns = (str(job), str(uid), state, "0", str(job), "N/A", "1", "1")
    line = "".join(column.ljust(24) for column in columns)
    return f"x\n{line}\nJobId={job} UserId=root(0) JobState={state} ExitCode=0:0\n{line}"


def test_names_and_comments_that_look_like_slurmctlds_answers_free_nothing(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: a job's name, comment and folder that look like squeue's or scontrol's answer.

    Stopped by: squeue is asked for columns of fixed width, none of them the user's text.
    """
    by_gpulock(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    held_job = slurm.submit("slalice", "--hold", "-w", NODE)
    job = JobId(held_job + 1)
    text = rows(job, 0, "COMPLETED")
    odd = (f"--job-name={text}", f"--comment={text}", f"--chdir={folder_of_lines(slurm_gpus, job)}")
    words = ["-w", NODE, "--gres=gpu:2", *odd, "--output=evil.out"]
    assert submit(slurm_gpus, "slalice", words, {}, "#!/bin/bash\nexec sleep 600\n") == job
    slurm.wait_running(job)
    assert "COMPLETED" in slurm.scontrol("show", "job", str(job))
    end(kill_steps(slurm_gpus, job, NODE))  # only slurmctld is left to say that it lives
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("held", "alive")] * 2
    assert "slurmctld says RUNNING" in told.reasons()
    slurm.scancel(job, held_job)
    slurm_gpus.wait_free()  # the lab itself would take the job's name for its state
    wait_until(lambda: notes(slurm_gpus, NODE) == [], why="the Epilog's last act")


def folder_of_lines(gpus: Gpulock, job: JobId) -> Path:
    """Make a folder with a name of several lines in slalice's home."""
    folder = gpus.slurm.users["slalice"].home / f"w\nSLURM_JOB_ID={job}\nSLURM_JOB_UID=0"
    folder.mkdir(exist_ok=True)
    os.chown(folder, ALICE, ALICE)
    return folder


# --- processes that pretend -----------------------------------------------------------------------


def pretend(
    gpus: Gpulock, user: str, title: str, env: Mapping[str, str], program: str = "sleep"
) -> subprocess.Popen[bytes]:
    """Run a process of a user on the node, outside of any job, with a title and environment."""
    copy = gpus.slurm.lab / "programs" / program
    if not copy.exists():
        script(gpus, program, "").write_bytes(Path("/bin/sleep").read_bytes())
    who = gpus.slurm.users[user]
    line = gpus.slurm.machines[NODE].enter(uid=who.uid, cwd="/")
    call = f"exec -a '{title}' {copy} 600"
    return subprocess.Popen([*line, "/bin/bash", "-c", call], env={"PATH": "/usr/bin:/bin", **env})


def test_a_process_that_pretends_to_be_slurms_neither_keeps_nor_frees_anothers_lock(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    """Tried: titles of step daemons and slurmd, and a hook's environment, on a user's processes.

    Stopped by: daemons and hooks are root's, and the kernel says whose a process is.
    """
    by_gpulock(slurm_gpus, extra=EXTRA, hooks=hooks.hooks)
    slurm = slurm_gpus.slurm
    living = started(slurm_gpus, NODE, "--gres=gpu:1")
    ended = started(slurm_gpus, NODE, "--gres=gpu:2")
    end(kill_steps(slurm_gpus, living, NODE))
    hooks.set("Epilog", NODE, "instead")
    slurm.scancel(ended)
    hooks.wait("Epilog", NODE, "instead", ended)
    hooks.go("Epilog", NODE, "instead")
    slurm.wait_done(ended)
    env = {"SLURM_JOB_ID": str(ended), "SLURMD_NODENAME": NODE}
    context = {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
    fakes = [
        pretend(slurm_gpus, "slbob", f"slurmstepd: [{ended}.batch]", {}, "slurmstepd"),
        pretend(slurm_gpus, "slbob", f"slurmstepd: [{ended}.extern]", env, "slurmstepd"),
        pretend(slurm_gpus, "slbob", "slurmstepd", {}, "slurmstepd"),
        pretend(slurm_gpus, "slbob", "/usr/sbin/slurmd", {**env, **context}, "slurmd"),
        pretend(slurm_gpus, "slalice", "sleep", {**env, **context}),
    ]
    try:
        wait_until(
            lambda: all(  # past nsenter and bash, which have it in a longer word
                Path(f"/proc/{fake.pid}/cmdline").read_bytes().endswith(b"\x00600\x00")
                for fake in fakes
            ),
            why="the pretenders",
        )
        told = reap(slurm_gpus, NODE)
        assert sorted(told.acts()) == [("freed", "dead")] * 2 + [("held", "alive")]
        assert "slurmctld says RUNNING" in told.reasons()
        assert held(slurm_gpus, living, NODE) == ["0"]
    finally:
        for fake in fakes:
            fake.kill()
            fake.wait()


def test_a_user_can_write_nothing_where_hooks_read(slurm_gpus: Gpulock) -> None:
    """Tried: to write, remove or rename each file and folder that a hook reads.

    Stopped by: all of it is root's, and no mode lets others write.
    """
    by_gpulock(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, "--gres=gpu:1")
    device = slurm_gpus.held_by(job)[NODE][0]
    claims = "/run/gpulock.claims"
    note = f"{claims}/tasks/{NODE}.{job}"
    tries = (
        f"touch {claims}/tasks/x",
        f"rm -f {note}",
        f"mv {note} {note}x",
        f"echo >>{note}",
        f"rm -rf /run/gpulock/locks/{device}",
        f"echo >>/run/gpulock/locks/{device}/owner",
        "mkdir /run/gpulock/locks/x",
        f"cat {claims}/gate",
        f"mkdir {claims}/claims/x",
        f"touch {claims}/x",
        f"rm -rf {claims}/claims/*",
        "touch /var/lib/gpulock/slurm-map",
        f"echo >>{CONFIG}",
    )
    before = tree(slurm_gpus)
    for line in tries:
        done = slurm.run_as("slalice", ["/bin/bash", "-c", line], machine=NODE)
        assert done.returncode != 0 and "ermission denied" in done.stderr, line
    assert tree(slurm_gpus) == before
    open_mode = [name for name, (mode, uid, _) in before.items() if mode & 0o022 or uid != 0]
    assert open_mode == []


def tree(gpus: Gpulock) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, uid and content of all that the hooks keep on the node."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for top in ("/run/gpulock", "/run/gpulock.claims", "/var/lib/gpulock"):
        for place in gpus.slurm.path_in(NODE, top).rglob("*"):
            info = place.lstat()
            text = place.read_bytes() if place.is_file() else b""
            found[f"{top}/{place.name}"] = (info.st_mode & 0o777, info.st_uid, text)
    return found


# --- a user's own TaskProlog ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_killed_or_stopped_taskprolog_starts_no_task(
    slurm_gpus: Gpulock, hooks: Stops, number: signal.Signals
) -> None:
    """Tried: to kill or stop the own TaskProlog, which runs as the user.

    Stopped by: Slurm starts no task without its TaskProlog's success.
    """
    by_gpulock(slurm_gpus, extra=EXTRA, hooks=hooks.hooks)
    slurm = slurm_gpus.slurm
    hooks.set("TaskProlog", NODE, "before")
    job = slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script=f"echo ran\n{SHOW_MASK}")
    pid = hooks.wait("TaskProlog", NODE, "before", job)
    kill = ["/bin/kill", f"-{number.value}", str(pid)]
    assert slurm.run_as("slalice", kill, machine=NODE).returncode == 0
    hooks.go("TaskProlog", NODE, "before")
    other = slurm.submit("slbob", "-w", NODE, "--gres=gpu:3", script=SHOW_MASK)
    assert slurm.wait_settled(other) == "COMPLETED"
    assert slurm.said(other).count(",") == 2
    if number == signal.SIGSTOP:
        assert slurm.state(job) == "RUNNING"
        assert held(slurm_gpus, job, NODE) == ["0"]
        assert "ran" not in slurm.said(job)
        slurm.scancel(job)
    assert slurm.wait_done(job) in ("FAILED", "CANCELLED")
    said = slurm.said(job)
    # Slurm continues what is stopped before it ends it: a TaskProlog may succeed in between
    assert "ran" not in said or (number == signal.SIGSTOP and "mask=0." in said)
    if number == signal.SIGSTOP:  # linuxproc kills what it listed before, not what begins then
        wait_until(partial(is_reaped, slurm_gpus, job, NODE), why="the lock to be gone")
    assert slurm_gpus.locks(NODE) == {}
    assert not slurm.is_out(NODE)


def test_a_taskprolog_of_the_users_own_changes_what_is_advice_and_no_lock(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: `srun --task-prolog` with a mask of every GPU, which is advice without a cgroup.

    Stopped by: the device cgroup, and the lock stays as it is.
    """
    own = script(slurm_gpus, "own", f"#!/bin/sh\necho export {MASK}=0,1,2,3\n")
    by_slurm(slurm_gpus, extra=EXTRA, proctrack="cgroup", constrain_devices=True)
    slurm = slurm_gpus.slurm
    opens = " ".join(str(slurm.device(NODE, minor)) for minor in ALL)
    step = f"srun --task-prolog={own} sh -c '{SHOW_MASK.strip()}; head -qc1 {opens}' 2>&1\n"
    script_ = f"{step}echo opened\nexec sleep 600\n"
    job = slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script=script_)
    said = wait_said(slurm_gpus, job, "opened")
    assert "mask=0,1,2,3." in said
    assert said.count("No such device or address") == 1  # it may: there is no driver
    assert said.count("Operation not permitted") == 3
    assert held(slurm_gpus, job, NODE) == ["0"]
    assert slurm_gpus.record_of(NODE, job).devices == (slurm_gpus.held_by(job)[NODE][0],)


@BOTH
def test_a_job_whose_output_cannot_be_written_runs_neither_unmasked_nor_refused(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    """Tried: outputs that are full, missing or closed, while a job is granted or refused.

    Stopped by: mask and refusal go through slurmstepd's pipe, not through the job's output.
    """
    mode(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    told = gate_file(slurm_gpus, "told")
    closed = f"exec >&- 2>&- <&-\nsrun --output=none sh -c 'echo ${MASK} >{told}'\n"
    places = ("/dev/full", "/dev/null", "/nonexistent/x", "out.%j")
    words = ("-w", NODE, "--gres=gpu:1")
    for job in [slurm.submit("slalice", *words, "-o", p, script=closed) for p in places]:
        slurm.wait_done(job)
    assert told.read_text() in {f"{number}\n" for number in ALL}
    assert slurm_gpus.locks(NODE) == {}
    told.unlink()
    ran = f"echo ran >{told}\n"
    with occupied(slurm_gpus, NODE, *ALL), impatient(slurm_gpus, NODE):
        for job in [slurm.submit("slalice", *words, "-o", p, script=ran) for p in places]:
            wait_refused(slurm_gpus, job)
        assert not told.exists()
    assert not slurm.is_out(NODE)


def wait_refused(gpus: Gpulock, job: JobId) -> None:
    """Wait until a job was requeued or has failed."""
    wait_until(
        lambda: gpus.slurm.state(job) == "FAILED" or gpus.slurm.job(job)["Restarts"] != "0",
        why=f"job {job} to be refused",
    )


# --- a TaskProlog that fails ----------------------------------------------------------------------


WITHOUT: Mapping[str, str] = {
    "settings": "Permission denied",
    "a note": "this node has no claim of the job",
}


@BOTH
@pytest.mark.parametrize("missing", WITHOUT)
def test_in_doubt_a_task_never_runs(
    slurm_gpus: Gpulock, hooks: Stops, mode: Mode, missing: str
) -> None:
    """Tried: root's words for a TaskProlog are away, or nobody else may read them.

    Stopped by: a TaskProlog that doubts fails, and its task does not start. What else may be wrong
    in them is in tests/unit/slurm/test_task.py.
    """
    mode(slurm_gpus, extra=EXTRA, hooks=hooks.hooks)
    slurm = slurm_gpus.slurm
    hooks.set("Prolog", NODE, "after")
    job = slurm.submit("slalice", "--no-requeue", "-w", NODE, "--gres=gpu:1", script="echo ran\n")
    hooks.wait("Prolog", NODE, "after", job)
    settings = slurm.path_in(NODE, CONFIG)
    if missing == "settings":
        settings.chmod(0o600)
    else:
        slurm.path_in(NODE, f"/run/gpulock.claims/tasks/{NODE}.{job}").unlink()
    hooks.go("Prolog", NODE, "after")
    wait_refused(slurm_gpus, job)
    settings.chmod(0o644)
    assert WITHOUT[missing] in slurm.said(job)
    assert "ran\n" not in slurm.said(job)
    assert not slurm.is_out(NODE)


def test_a_task_of_a_refused_job_cannot_be_run_by_a_step_that_hides_its_job(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: `srun --jobid --overlap` into a refused job, from outside.

    Stopped by: a refused allocation is cancelled, and a batch job's script never starts an srun.
    """
    by_gpulock(slurm_gpus, {"SLURM_WAIT": "8"}, extra=EXTRA)  # time for some tries
    slurm = slurm_gpus.slurm
    told = gate_file(slurm_gpus, "told")
    with occupied(slurm_gpus, NODE, *ALL):
        job = slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script="exec sleep 600\n")
        attach = ["srun", f"--jobid={job}", "--overlap", "sh", "-c", f"echo ran >{told}"]
        slurm.wait_state(job, *STARTED)  # of one that is still to start none could be run
        tries = 0
        while slurm.job(job)["Restarts"] == "0" and tries < 20:
            slurm.run_as("slalice", attach)
            tries += 1
        wait_requeued(slurm_gpus, job)
        assert tries > 0 and not told.exists()
