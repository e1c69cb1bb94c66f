# SPDX-License-Identifier: Apache-2.0
"""What the Grid Engine hooks share: arguments, the shepherd above, the record of a job, words.

Hot. `drop-env` starts a hook as `HOOK SHEPHERD_PID [OWNER COMMAND...]`, with the site's own
hook behind it, and with JOB_ID, SGE_TASK_ID and QUEUE in the environment: execd's words, not the
job's.
stdout decides nothing; stderr is the job's own output file; syslog is the administrator's.
"""

import errno
import os

from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, Refusal, UnexpectedError
from gpulock.hooks.frame import observer_judge
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import spool
from gpulock.sge.spool import Spool
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpulock.alloc.liveness import Judge, LivenessRule

DONE, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100  # docs/facts/grid-engine.md, exit codes
TRIAL_JOB = "self-test"  # JOB_ID where doctor or install tries a hook; execd's is a number
LIMITED = (errno.EFBIG, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)  # what a job's limits cause


class SgeHookCall:
    """How a hook was started: whose it is, by execd's own words.

    `site` is the site's own hook, with the job's owner before it. `limited` says
    that the job's limits hold. `tried`: by doctor or install, without a job. Nobody is to be told
    in syslog.
    """

    __slots__ = ("array_task", "job", "limited", "shepherd", "site", "task", "tried", "who")

    def __init__(self, argv: list[str], environ: "Mapping[str, str]") -> None:
        given = argv[1] if len(argv) > 1 else ""
        self.shepherd = int(given) if given.isascii() and given.isdigit() else os.getppid()
        self.site = argv[2:]
        self.limited = "GPULOCK_LIMITED" in environ
        self.job = environ.get("JOB_ID", "")
        self.tried = self.job == TRIAL_JOB
        self.task = environ.get("SGE_TASK_ID", "")
        self.array_task = self.task if self.task not in ("0", "undefined") else ""
        self.who = f"job {self.job or '?'}{self.array_task and f'.{self.array_task}'}"


def find_spool(node: Node, call: SgeHookCall) -> Spool:
    """Return the spool of the shepherd that started us, checked against execd's words."""
    above = [os.getppid()]  # the shepherd, or the launcher between it and us
    try:
        above.append(node.proc.stat(above[0]).ppid)
    except (OSError, ValueError):
        pass  # then it must be our parent
    if call.shepherd not in above:
        raise Refusal(
            BROKEN, f"not started by sge_shepherd (parent {call.shepherd})", "see gpulock doctor"
        )
    uid = os.geteuid() if node.settings.simulation else 0
    found = spool.open_shepherd_spool(node.proc, call.shepherd, uid)
    task = call.task if call.task.isdigit() and call.task != "0" else "1"
    if (found.job, found.task) != (call.job, task):
        raise Refusal(
            INVALID_REQUEST,
            f"the spool is of job {found.job}.{found.task}, the hook was started for "
            f"{call.job}.{task}",
            "see gpulock doctor for the hook's command line",
        )
    return found


def make_sge_owner(node: Node, found: Spool, uid: int) -> Owner:
    """Return the record of a job, all but the devices; raise Refusal.

    Where 8.1.10 starts jobs by systemd (USE_CGROUPS=systemd), the group that `config` names is on
    no process: a job that lives would be proven dead.
    """
    if found.config.get("use_systemd") == ["yes"]:
        raise Refusal(
            INVALID_REQUEST,
            "execd has systemd start the job, so no process can be known as the job's",
            "take USE_CGROUPS=systemd out of execd_params",
        )
    return Owner(
        scheduler="sge",
        cluster=node.settings.sge_cell,
        node=node.name,
        job_id=found.job,
        task_id=found.array_task,
        pid=found.pid,
        start=found.start,
        user=found.need("job_owner"),
        uid=uid,
        queue=found.need("queue"),
        spool_dir=found.path,
        add_grp_id=0 if node.settings.simulation else found.number("add_grp_id"),
        scope=systemd_unit_path(found) if "systemd_scope" in found.config else "",
        sid=node.proc.stat(found.pid).session if node.settings.simulation else 0,
        boot_id=node.boot_id,
        pid_ns=node.proc.pid_namespace(""),
    )


def systemd_unit_path(found: Spool) -> str:
    """Return the cgroup, from the top, of the unit to which execd has systemd move a job.

    Tasks of a parallel job have scopes of their own in the job's slice: then it is the slice. A
    unit a-b.slice is in a.slice (systemd.slice(5)).
    """
    slice_, scope = found.need("systemd_slice"), found.need("systemd_scope")
    words = slice_.removesuffix(".slice").split("-")
    names = ["-".join(words[: n + 1]) + ".slice" for n in range(len(words))]
    if "-jobs-" not in slice_:
        names.append(scope)
    return "" if "/" in slice_ + scope else "/" + "/".join(names)


def make_sge_judge(node: Node) -> "Judge":
    """Return a judge of the locks that a Grid Engine node may hold."""
    from gpulock.alloc.liveness import Judge, process_verdict
    from gpulock.alloc.process_scan import ProcessScan
    from gpulock.sge import verdict
    from gpulock.sge.members import SgeMembers

    rules: dict[str, LivenessRule] = {
        "sge": verdict.SgeJobRule(node),
        "process": process_verdict,
    }
    return Judge(node.boot_id, ProcessScan(node.proc), rules, {"sge": SgeMembers(node)})


def make_sge_observer(node: Node) -> "Judge":
    """Return a judge for a release: it knows whose processes are left, and judges no owner."""
    from gpulock.sge.members import SgeMembers

    return observer_judge(node, {"sge": SgeMembers(node)})


def sge_hook_exit_code(refusal: Refusal, settings: "Settings | None") -> int:
    """Return what Grid Engine is told (docs/grid-engine.md, what a job sees)."""
    if refusal.kind == INVALID_REQUEST:
        return JOB_ERROR
    if refusal.kind == BUSY and settings is not None and settings.on_busy == "error":
        return JOB_ERROR
    if refusal.kind == BROKEN and (settings is None or settings.on_broken == "stop"):
        return QUEUE_ERROR
    return REQUEUE


def blame_job_limits(refusal: Refusal) -> Refusal:
    """Blame the job's own limits for what went wrong under them: no user stops a node."""
    cause = refusal.__cause__
    limited = isinstance(cause, OSError) and cause.errno in LIMITED
    if not (refusal.kind == BROKEN or limited or isinstance(refusal, UnexpectedError)):
        return refusal
    return Refusal(
        INVALID_REQUEST,
        f"under the job's own limits (h_vmem, h_data, h_stack, h_fsize): {refusal.why}",
        "ask for higher limits",
    )
