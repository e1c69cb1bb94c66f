# SPDX-License-Identifier: Apache-2.0
"""The TaskProlog of Slurm: give each task the mask of what this node granted to its job.

Hot. It runs as the user, so it informs and is no boundary; but a task whose TaskProlog fails never
starts (docs/facts/slurm.md), and every doubt fails. The job and step come from the title of the
process that becomes the task (`slurmstepd: [12.0]`): SLURM_JOB_ID is the leader's in a component
of a heterogeneous job, and in a batch step SLURM_STEP_ID is what the user exported.
"""

import errno
import os

from gpulock.errors import (
    BROKEN,
    INVALID_REQUEST,
    LINE_BYTES,
    UNKNOWN,
    Refusal,
    one_line,
    shorten,
)
from gpulock.job import environment
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.slurm import note, task_devices
from gpulock.slurm.call import is_slurm_name, is_slurm_number, parse_stepd_title
from gpulock.slurm.note import REQUEUE_EXIT, TaskNote
from gpulock.slurm.task_devices import Task
from gpulock.store import atomic
from gpulock.store.locks import LockStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GO_ON, FAILED = 0, 1
ORDINAL = "GPU_DEVICE_ORDINAL"
STEP_MARK = "user.gpulock"  # gpulock.isolation.job's: an import of it would cost each task


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Print what slurmstepd is to do for this task; return the exit code, not 0 to stop it."""
    try:
        settings = read_settings(config)
        return answer_task(settings, environ, Proc(settings.proc_root))
    except Refusal as refusal:
        message = refusal.sentence(f"job {environ.get('SLURM_JOB_ID', '?')}")
        # what cannot be found out is not this job's fault
        code = FAILED if refusal.kind == INVALID_REQUEST else REQUEUE_EXIT
    except Exception as fault:  # the one broad handler: in doubt a task does not start
        message, code = f"gpulock: {type(fault).__name__}: {fault}", REQUEUE_EXIT
    return print_task_message(message, code)


def answer_task(settings: Settings, environ: "Mapping[str, str]", proc: Proc) -> int:
    """Tell slurmstepd what the task gets, or that its job was refused; return the exit code.

    Raises Refusal, OSError, LookupError.
    """
    job, step = find_task_step(proc, environ)
    slurmd = environ.get("SLURMD_NODENAME", "")
    if not (is_slurm_number(job) and is_slurm_name(slurmd)):
        raise Refusal(UNKNOWN, "not called as a TaskProlog", "see docs/slurm.md")
    if settings.isolation == "cgroup":
        check_confined(proc, job, settings.sys_root)
    store = LockStore(settings.lock_dir)
    own = note.find_task_note(store.root, slurmd, job)
    task = Task(environ, step)
    if own is None or own.uid != os.getuid():
        lines = mask_task_without_note(settings, environ, task)
        return write_to_slurmstepd("".join(lines), GO_ON)
    check_run(own, environ)
    if own.refused:
        return print_task_message(own.refused, own.code or FAILED)
    lines = []
    if own.devices:
        note.check_task_claim(store, own)
        opened, denied = probe_devices(settings.dev_root, own.devices)
        chosen, mask = task_devices.select_task_devices(task, own, settings, opened, denied)
        lines = task_export_lines(chosen, settings, environ, mask)
        if own.binds:
            bind_lists = environment.user_bind_lists(environ)
            lines += [task_bind_line(name, old, own.binds) for name, old in bind_lists]
    elif settings.hide_unrequested:
        lines = task_export_lines([], settings, environ)
    return write_to_slurmstepd("".join(lines), GO_ON)


def check_run(own: TaskNote, environ: "Mapping[str, str]") -> None:
    """Raise Refusal by a note of an earlier run, where this one's Prolog left none.

    A user who says another count than Slurm stops no task but own ones (docs/facts/slurm.md).
    """
    count = environ.get("SLURM_RESTART_COUNT", "0")
    if is_slurm_number(count) and int(count) > own.restart:
        why = f"the claim here is of the job's run {own.restart}, and this is run {count}"
        raise Refusal(UNKNOWN, why, "did the Prolog run? see gpulock doctor on the node")


def check_confined(proc: Proc, job: str, sys_root: str) -> None:
    """Raise Refusal in a step that no PAM session has confined: Slurm was not told to open one."""
    text = proc.read(os.getpid(), "cgroup").decode("utf-8", "surrogateescape")
    if f"/gpulock-{job}." in text:
        return
    # version 2: Slurm has moved the task, and the session has marked its step's own cgroup
    step, in_step, _ = text.partition("0::")[2].partition("/user/task_")
    try:
        mark = os.getxattr(f"{sys_root}/fs/cgroup{step}", STEP_MARK) if in_step else b""
    except OSError:
        mark = b""
    if not mark.startswith(f"gpulock-{job}.".encode()):
        raise Refusal(
            BROKEN, "the step is not confined to its devices", "set UsePAM=1, see docs/isolation.md"
        )


def find_task_step(proc: Proc, environ: "Mapping[str, str]") -> tuple[str, str]:
    """Return (job id, step) by the process that becomes the task, else by slurmstepd's words."""
    try:
        job, step = parse_stepd_title(proc.read(os.getppid(), "cmdline"))
    except (OSError, ValueError):
        job = step = ""
    if job:
        return job, step
    return environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "batch")


def mask_task_without_note(
    settings: Settings, environ: "Mapping[str, str]", task: Task
) -> list[str]:
    """Mask a task of which the Prolog left no word; stop one that Slurm gave GPUs."""
    if task.positions or "SLURM_GPUS_ON_NODE" in environ:
        raise Refusal(
            UNKNOWN,
            "this node has no claim of the job, although Slurm gave it GPUs",
            "did the Prolog run? see gpulock doctor on the node",
        )
    return task_export_lines([], settings, environ) if settings.hide_unrequested else []


def probe_devices(dev_root: str, devices: list[Device]) -> tuple[list[Device], list[Device]]:
    """Return the devices that this process, and so its task, may open; and those it is denied.

    access(2) asks the device cgroup, and opens nothing. A node that is missing is denied to nobody.
    Denied are those that a device cgroup denies, and not their node's mode: open(2) tells the two
    apart (docs/facts/slurm.md, device constraint), and opens nothing where access(2) was denied.
    """
    opened: list[Device] = []
    denied: list[Device] = []
    for device in devices:
        path = f"{dev_root}/nvidia{device.minor}"
        if os.access(path, os.R_OK | os.W_OK) or not os.path.lexists(path):
            opened.append(device)
            continue
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError as fault:
            if fault.errno == errno.EPERM:
                denied.append(device)
    return opened, denied


def task_export_lines(
    chosen: "list[Device] | None",
    settings: Settings,
    environ: "Mapping[str, str]",
    mask: "str | None" = None,
) -> list[str]:
    """Return the export lines of a task with this environment.

    `mask` is Slurm's own value, which stands.

    One that is empty is exported as such: an unset CUDA_VISIBLE_DEVICES shows every GPU. Where
    `chosen` is None every other name is left out: it would be another step's.
    """
    pairs = dict(environment.grant_variables(chosen or [], settings))
    if chosen is None:
        pairs = {name: value for name, value in pairs.items() if "CUDA_" in name}
    keep: list[str] = []
    if mask is not None:
        for prefix in ("", *environment.CONTAINER_PREFIXES):
            pairs[f"{prefix}{task_devices.MASK}"] = mask
            pairs.pop(f"{prefix}{ORDINAL}", None)
        keep.append(ORDINAL)  # Slurm's own, as its mask is
    drop = environment.grant_variable_names()
    if any([value.startswith(f"{settings.mps_dir}/") for value in environ.values()]):
        from gpulock.job.mps import stale_mps_names

        drop |= stale_mps_names(environ.items(), settings.mps_dir)
    unset = [n for n in sorted(drop) if n not in pairs and n not in keep]
    return [
        *[f"unset {name}\n" for name in unset],
        *[f"export {name}={value}\n" for name, value in pairs.items()],
    ]


def task_bind_line(name: str, old: str, binds: str) -> str:
    """Return the line that appends the driver's files to the user's own binds."""
    kept = old if old.isprintable() else ""  # a newline in it would be a line of ours
    return f"export {name}={environment.append_binds(kept, binds)}\n"


def print_task_message(sentence: str, code: int) -> int:
    """Print a sentence, as one short line, to the task's own output."""
    return write_to_slurmstepd(f"print {shorten(one_line(sentence), LINE_BYTES)}\n", code)


def write_to_slurmstepd(text: str, code: int) -> int:
    """Write to slurmstepd; a task that cannot be told does not start."""
    try:
        atomic.write_descriptor(1, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return code or FAILED
    return code
