# SPDX-License-Identifier: Apache-2.0
"""The PAM session of a Slurm step: with ISOLATION=cgroup it keeps the step to its job's devices.

Hot. With UsePAM=1 a step daemon opens a session of the service `slurm` before it starts a task,
and closes it when all are over; pam_exec runs this program then, as root and as the step daemon's
child. No other place of Slurm's is as late as the step daemon and earlier than the user: a Prolog
comes before there is a step, a TaskProlog is the user's. What fails here fails the step.
"""

import os

from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.frame import HookRun, log_hook_line
from gpulock.isolation import job
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import note
from gpulock.slurm.call import parse_stepd_title
from gpulock.slurm.steps import STEPD
from gpulock.store import kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GO_ON, FAILED = 0, 1
BATCH = "batch"  # the step that is the job's script
CLOSE = "close_session"  # PAM_TYPE of pam_exec(8)


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Confine the step above, or free it; return the exit code, which pam_exec obeys.

    Of a session that is closed slurmstepd only logs it: the step is over, and nothing is put back.
    """
    run, closing = HookRun(), environ.get("PAM_TYPE") == CLOSE
    node, step = run.load(config), None
    if node is not None:
        if node.settings.isolation == "off":
            return GO_ON
        step = run.attempt(lambda: find_parent_step(node, os.getppid()))
    if node is not None and step is not None:
        run.attempt(lambda: confine_or_free_step(node, step, environ.get("PAM_USER", ""), closing))
    if run.refusal is None:
        return GO_ON
    sentence = run.refusal.sentence(f"step {step.label if step else '?'}")
    run.log(sentence, error=True)
    if run.settings is not None and step is not None and not closing:
        drain_and_requeue(run.settings, step.label, sentence)
    return FAILED


def confine_or_free_step(node: Node, step: job.IsolatedJob, user: str, closing: bool) -> None:
    """Keep a step to its job's devices, or let it go at its end; raise Refusal."""
    if not closing:
        devices = find_step_devices(node, step.label.partition(".")[0], user)
        job.begin_job_isolation(node, step, devices)
    elif left := job.end_job_isolation(node, f"{step.label}-", step):
        line = f"gpulock: step {step.label}: its isolation is kept: {left}"
        log_hook_line(node.settings, line, error=True)


def drain_and_requeue(settings: Settings, label: str, sentence: str) -> None:
    """Drain the node, and requeue a batch job: slurmctld takes a script that never ran for done."""
    from gpulock.slurm.refuse import send_drain
    from gpulock.slurm.scontrol import SlurmctldClient, slurm_array_task_name

    number, _, step = label.partition(".")
    control = SlurmctldClient(settings)
    try:
        own = find_note_by_job(Node(settings), number)
        if own and settings.on_broken == "stop":
            send_drain(control, own.slurmd, sentence)
        answer = control.job(number) if step == BATCH else None
    except Refusal:
        return  # Slurm drains it for its own reason
    if answer:
        control.do("scontrol", "requeue", slurm_array_task_name(answer))


def find_parent_step(node: Node, pid: int) -> job.IsolatedJob:
    """Return the step whose daemon started us; raise Refusal."""
    try:
        status = node.proc.status(pid)
        number, step = parse_stepd_title(node.proc.read_memory(pid, "cmdline"))
        start = node.proc.start(pid)
    except (OSError, ValueError) as fault:
        raise Refusal(UNKNOWN, f"process {pid} cannot be seen: {fault}", "see syslog") from fault
    root = {node.settings.root_uid()}
    if status.name != STEPD or set(status.uids[:3]) != root or not number:
        raise Refusal(
            UNKNOWN, f"the parent {pid} is {status.name!r}, no step daemon", "see docs/isolation.md"
        )
    return job.IsolatedJob(f"{number}.{step}", pid, start)


def find_step_devices(node: Node, number: str, user: str) -> list[Device]:
    """Return the devices of a job by its note and its claim, none where it has none.

    Raises Refusal where they do not agree.
    """
    own = find_note_by_job(node, number)
    if own is None or not own.devices:
        return []
    record = note.check_task_claim(node.store, own)
    # else it is of an earlier job of this id
    return own.devices if record.user == user or str(record.uid) == user else []


def find_note_by_job(node: Node, number: str) -> "note.TaskNote | None":
    """Return what this node granted to a job, None where it was not asked; raise Refusal."""
    folder = f"{node.store.root}/{note.FOLDER}"
    try:
        names = [n for n in os.listdir(folder) if n.rpartition(".")[2] == number and n[0] != "."]
        if len(names) > 1:
            raise Refusal(
                UNKNOWN, f"several nodes on this machine run job {number}", "run one slurmd"
            )
        return (
            note.find_task_note(node.store.root, names[0].rpartition(".")[0], number)
            if names
            else None
        )
    except FileNotFoundError:
        return None
    except (OSError, kv.MalformedError) as fault:
        raise Refusal(UNKNOWN, f"the note of job {number}: {fault}", f"look at {folder}") from fault
