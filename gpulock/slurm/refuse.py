# SPDX-License-Identifier: Apache-2.0
"""What Slurm is told when a job may not have its devices (docs/slurm.md, what a job sees).

Hot, loaded for a refusal. A batch job of one node needs no word to slurmctld: its TaskProlog says
why and exits with REQUEUE_EXIT. A job without a script, or of several nodes, is requeued or
cancelled as a whole; a broken node is drained with our reason, not with Slurm's.
"""

from gpulock.errors import BUSY, INVALID_REQUEST, Refusal, one_line, shorten
from gpulock.node.settings import Settings
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.note import REQUEUE_EXIT
from gpulock.slurm.scontrol import SlurmctldClient, is_later_run, slurm_array_task_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

AT_WORK = ("RUNNING", "CONFIGURING", "SUSPENDED")
REASON_BYTES = 200  # of a reason, which lists show
STAYS, NOT_CANCELLED = "it stays as it is", "it cannot be cancelled"
NOT_RUNNING = "it does not run any more"  # ended, requeued, or of a node that refused it as well
NOT_DONE = (STAYS, NOT_CANCELLED)  # how what was not done begins


def task_prolog_exit_code(refusal: Refusal, settings: Settings) -> int:
    """Return what TaskProlog exits with: 1 fails the job, REQUEUE_EXIT requeues it."""
    if refusal.kind == INVALID_REQUEST or (refusal.kind == BUSY and settings.on_busy == "error"):
        return 1
    return REQUEUE_EXIT


def drain_slurm_node(call: SlurmHookCall, settings: Settings, sentence: str) -> None:
    """Drain this node with our reason; where slurmctld does not answer, Slurm's stands."""
    control = SlurmctldClient(settings, call.conf)
    notify_slurm_job(call, control, sentence)
    send_drain(control, call.slurmd, sentence)


def send_drain(control: SlurmctldClient, slurmd: str, sentence: str) -> None:
    """Have slurmctld drain a node, by Slurm's own name of it."""
    reason = f"Reason={quote_scontrol_text(sentence)}"
    control.do("scontrol", "update", f"NodeName={slurmd}", "State=DRAIN", reason)


def notify_slurm_job(call: SlurmHookCall, control: SlurmctldClient, sentence: str) -> None:
    """Say it on the standard error of an srun or salloc that waits."""
    if not call.batch:
        control.do("scontrol", "notify", call.job, quote_scontrol_text(sentence))


def requeue_or_cancel_job(
    call: SlurmHookCall, settings: Settings, refusal: Refusal, sentence: str, noted: bool = True
) -> str:
    """Requeue or cancel a job that its TaskProlog alone cannot give back; return what was done.

    Without a note (`noted`) that is every job.
    By the name of the array task: for the task whose id is the array's, a bare id would mean
    every other task as well (docs/facts/slurm.md). Components of a heterogeneous job: their leader.
    """
    if noted and call.batch and call.nodes == 1:
        return ""
    control = SlurmctldClient(settings, call.conf)
    notify_slurm_job(call, control, sentence)
    job = call.leader or call.job
    try:
        answer = control.job(job)
    except Refusal as silent:
        return f"{STAYS}: {silent.why}"
    if not is_slurm_run_active(answer, call):
        return NOT_RUNNING
    name = slurm_array_task_name(answer)
    control.do(
        "scontrol", "update", f"JobId={name}", f"AdminComment={quote_scontrol_text(sentence)}"
    )
    ways: "list[tuple[tuple[str, ...], str]]" = [(("scancel",), "it is cancelled")]
    if answer["Batch"] == "1" and task_prolog_exit_code(refusal, settings) != 1:
        ways.insert(0, (("scontrol", "requeue"), "it is requeued"))
    for command, done in ways:
        if control.do(*command, name):
            return done
        try:
            answer = SlurmctldClient(settings, call.conf).job(job)
        except Refusal as silent:
            return f"{STAYS}: {silent.why}"
        if not is_slurm_run_active(answer, call):
            return NOT_RUNNING
    return NOT_CANCELLED


def is_slurm_run_active(
    answer: "dict[str, str] | None", call: SlurmHookCall
) -> "TypeGuard[dict[str, str]]":
    """Return whether slurmctld still has the run that called us at work."""
    if answer is None or answer["State"] not in AT_WORK:
        return False
    return not is_later_run(answer, call.restart)


def quote_scontrol_text(sentence: str) -> str:
    """Return a sentence as scontrol takes it."""
    return shorten(one_line(sentence).replace('"', "'"), REASON_BYTES)
