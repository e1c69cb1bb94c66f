# SPDX-License-Identifier: Apache-2.0
"""What the Grid Engine hooks share: their arguments, and the shepherd above.

Hot. `drop-env` starts a hook as `HOOK SHEPHERD_PID [OWNER COMMAND...]`, with the site's own
hook behind it, and with JOB_ID, SGE_TASK_ID and QUEUE in the environment: execd's words, not the
job's.
stdout decides nothing; stderr is the job's own output file; syslog is the administrator's.
"""

import os

from gpulock.errors import BROKEN, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.sge import spool
from gpulock.sge.spool import Spool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DONE, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100  # docs/facts/grid-engine.md, exit codes
TRIAL_JOB = "self-test"  # JOB_ID where doctor or install tries a hook; execd's is a number


class SgeHookCall:
    """How a hook was started: whose it is, by execd's own words.

    `site` is the site's own hook, with the job's owner before it. `limited` says
    that the job's limits hold. `tried`: by doctor or install, without a job. Nobody is to be told
    in syslog.
    """

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
    above = os.getppid()
    if above != call.shepherd:  # `drop-env` is between the shepherd and us
        try:
            above = node.proc.stat(above).ppid
        except (OSError, ValueError):
            pass  # then it must be our parent
    if above != call.shepherd:
        why = f"not started by sge_shepherd (parent {above}, not {call.shepherd})"
        raise Refusal(BROKEN, why, "see gpulock doctor")
    job_spool = spool.open_shepherd_spool(node.proc, call.shepherd, node.settings.root_uid())
    task = call.task if call.task.isdigit() and call.task != "0" else "1"
    if (job_spool.job, job_spool.task) != (call.job, task):
        raise Refusal(
            INVALID_REQUEST,
            f"the spool is of job {job_spool.job}.{job_spool.task}, the hook was started for "
            f"{call.job}.{task}",
            "see gpulock doctor for the hook's command line",
        )
    return job_spool
