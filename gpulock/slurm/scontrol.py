# SPDX-License-Identifier: Apache-2.0
"""Ask slurmctld, or tell it something, with a deadline.

Hot, but loaded only then: on the usual path no hook speaks to slurmctld, which may take 18 s not
to answer (facts/slurm.md, answers). That it does not answer is unknown, never an answer. squeue is
asked for fixed fields: what `scontrol show job` prints holds the job's name and comment, which
its owner can make look like anything.
"""

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, one_line, shorten
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.settings import Settings
from gpulock.slurm.call import is_slurm_number

HINT = "is slurmctld up?"
INVALID = "Invalid job id specified"
WIDTH, WIDE = 24, 400  # columns
SAID_BYTES = 100  # of an error of squeue
FIELDS = (
    ("JobID", "JobID"),
    ("UserID", "Uid"),
    ("State", "State"),
    ("RestartCnt", "Restarts"),
    ("ArrayJobID", "Array"),
    ("ArrayTaskID", "Task"),
    ("BatchFlag", "Batch"),
    ("tres-per-job", "PerJob"),
    ("tres-per-socket", "PerSocket"),
    ("tres-per-task", "PerTask"),
    ("tres-per-node", "Gres"),
)
REQUESTS = ("PerJob", "PerSocket", "PerTask", "Gres")  # may be of any length
ANSWER_SECONDS = 5.0  # for all answers of slurmctld to one client
COLUMNS = [(name, key, WIDE if key in REQUESTS else WIDTH) for name, key in FIELDS]
FORMAT = ",".join([f"{name}:{width}" for name, _, width in COLUMNS])
WHOLE = sum([width for _, _, width in COLUMNS])
OVER = (  # states of a job that will never run again as it was
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
)


class SlurmctldSilentError(Refusal):
    """Refuse because slurmctld did not say what it was asked: that tells nothing of this node.

    `heard`: it answered, though not about this job; of another one it may.
    """

    def __init__(self, why: str, heard: bool = False) -> None:
        super().__init__(UNKNOWN, why, HINT)
        self.heard = heard


class SlurmctldClient:
    """slurmctld, as this node's programs reach it; `conf` is the slurm.conf that slurmd named.

    `silent` is why it is asked nothing any more: it did not answer.
    """

    def __init__(self, settings: Settings, conf: str = "") -> None:
        self._settings = settings
        self._answers: "dict[str, dict[str, str] | None]" = {}
        self._deadline: "Deadline | None" = None
        self.silent: "Refusal | None" = None
        self._env = {"PATH": "/usr/bin:/bin"}
        if settings.slurm_conf or conf:
            self._env["SLURM_CONF"] = settings.slurm_conf or conf

    def run(self, program: str, *arguments: str) -> tuple[int, str]:
        """Return (exit code, output); raise Refusal(UNKNOWN)."""
        path = f"{self._settings.slurm_binaries}/{program}"
        if self._deadline is None:  # one for all questions: a reconcile asks with the gate held
            self._deadline = Deadline(ANSWER_SECONDS)
        try:
            code, output = SchedulerProgram(path, self._env, HINT).answer(
                list(arguments), self._deadline
            )
        except Refusal as fault:
            raise SlurmctldSilentError(fault.why) from fault
        return code, output.decode("utf-8", "replace")

    def job(self, job: str) -> "dict[str, str] | None":
        """Return what slurmctld knows of one job, None where it knows none such; raise Refusal.

        Asked once: where it is silent it is so for every job of a reconcile.
        """
        if self.silent is not None:
            raise self.silent
        if job not in self._answers:
            try:
                self._answers[job] = self._ask(job)
            except SlurmctldSilentError as silent:
                if not silent.heard:
                    self.silent = silent
                raise
        return self._answers[job]

    def _ask(self, job: str) -> "dict[str, str] | None":
        code, output = self.run("squeue", "-h", "-t", "all", "-j", job, "-O", FORMAT)
        if code != 0 and INVALID in output:
            return None
        if code != 0:
            said = output.strip().rpartition("\n")[2].replace("squeue: error: ", "")
            raise SlurmctldSilentError(f"squeue says {shorten(one_line(said), SAID_BYTES)!r}")
        # squeue fills every column up: a shorter line is cut off
        rows = [parse_squeue_row(line) for line in output.split("\n") if len(line) >= WHOLE]
        for row in rows:
            if row["JobID"] == job:
                return row
        if [row for row in rows if row["JobID"].isdigit() and row["Array"] == job]:
            return None  # of an array whose id it was, only other tasks are left
        raise SlurmctldSilentError(f"squeue says nothing of job {job}", heard=True)

    def do(self, program: str, *arguments: str) -> bool:
        """Return whether a command was obeyed; what slurmctld does not answer was not."""
        try:
            return self.run(program, *arguments)[0] == 0
        except Refusal:
            return False


def parse_squeue_row(line: str) -> dict[str, str]:
    """Return the fields of one line, which stand in columns of fixed width."""
    row: dict[str, str] = {}
    for _, key, width in COLUMNS:
        row[key], line = line[:width].strip(), line[width:]
    return row


def is_request_cut_off(text: str) -> bool:
    """Return whether a request may go on behind its column: what is there Slurm charges as well.

    The column is full, or seems to end with the blanks that may stand before a number or a name.
    """
    return len(text) >= WIDE or text.endswith((":", "=", "/", ","))


def slurm_array_task_name(row: dict[str, str]) -> str:
    """Return the name that means this one task: a bare id may mean the whole array."""
    array, task = row["Array"], row["Task"]
    return f"{array}_{task}" if array.isdigit() and task.isdigit() else row["JobID"]


def slurm_job_uid(row: dict[str, str]) -> int:
    """Return the job's uid, -1 where it is not told."""
    return int(row["Uid"]) if is_slurm_number(row["Uid"]) else -1


def is_later_run(row: dict[str, str], restart: int) -> bool:
    """Return whether slurmctld tells of a later run of the job than this one."""
    return is_slurm_number(row["Restarts"]) and int(row["Restarts"]) > restart
