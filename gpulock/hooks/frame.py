# SPDX-License-Identifier: Apache-2.0
"""The frame of a hook: its settings, what its work ends with, its log; and the tail of a claim.

Hot. Each hook of both schedulers runs in it: whatever goes wrong is a refusal with one sentence.
"""

import os

from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, LINE_BYTES, Refusal, UnexpectedError, shorten
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.system_log import ERROR, INFO, log_to_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from gpulock.alloc.claim import Grant
    from gpulock.alloc.job_processes import JobMembers
    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.release import ReleaseResult
    from gpulock.store.owner import Owner

    Result = TypeVar("Result")

SECONDS = 60.0  # for a whole hook: Grid Engine sets no limit, PrologEpilogTimeout should be longer


class HookRun:
    """One run of a hook, since `begun`; `refusal` is why its work was not done.

    In a `trial`, by doctor or install, there is no job, and nobody to tell in syslog.
    """

    def __init__(self, trial: bool = False) -> None:
        self.begun = clock_boottime()
        self.deadline = Deadline(SECONDS)
        self.settings: "Settings | None" = None
        self.refusal: "Refusal | None" = None
        self.trial = trial

    def attempt(
        self, work: "Callable[[], Result]", claimant: "Owner | None" = None
    ) -> "Result | None":
        """Return what a part of the work gives, None where it is refused or fails.

        An unforeseen failure counts against `claimant` in the look for a broken node.
        """
        try:
            return work()
        except Refusal as refusal:
            self.refusal = refusal
        except Exception as fault:  # the one broad handler: whatever it is, it is told
            self.refusal = unexpected_refusal(fault)
            if claimant is not None and self.settings is not None:
                from gpulock.alloc.claim import count_unknown_refusal

                count_unknown_refusal(Node(self.settings), self.refusal, claimant, self.deadline)
        return None

    def load(self, config: str) -> "Node | None":
        """Return the node by its settings, None where they are refused."""

        def read() -> Node:
            self.settings = read_hook_settings(config, to_syslog=not self.trial)
            return Node(self.settings)

        return self.attempt(read)

    def run(
        self, config: str, work: "Callable[[Node], Result]", claimant: "Owner | None" = None
    ) -> "Result | None":
        """Do the work by the settings; return as `attempt` does."""
        node = self.load(config)
        return None if node is None else self.attempt(lambda: work(node), claimant)

    def seconds(self) -> float:
        """Return how long it has run."""
        return clock_boottime() - self.begun

    def log(self, sentence: str, error: bool = False) -> None:
        """Write a line to syslog and, for an error, to the job."""
        log_hook_line(self.settings, sentence, error, to_syslog=not self.trial)


def complete_claim(
    node: Node,
    grant: "Grant",
    deadline: Deadline,
    record: "Callable[[], None]",
    tell: "Callable[[], None]",
    undo: "Callable[[], None]",
) -> None:
    """Record a claim, wait for its MPS and tell its job; undo it where that fails, and raise it."""
    try:
        record()
        if node.settings.share_mps and grant.owner.places:
            from gpulock.job import mps

            mps.wait_for_mps(node, grant.owner, deadline)
        tell()
    except BaseException:  # whatever it is, the job does not start: it keeps nothing
        undo()
        raise


def undo_claim(node: Node, grant: "Grant", judge: "Judge", deadline: Deadline) -> None:
    """Take back a claim whose job was not told; what fails is left to epilog and reaper."""
    from gpulock.alloc.release import release_locks

    token = grant.owner.token
    try:
        release_locks(node, lambda o: o.token == token, judge, deadline, "claim undone")
    except (Refusal, OSError):
        return


def release_job(
    node: Node,
    run: HookRun,
    who: str,
    ours: "Callable[[Owner], bool]",
    judge: "Callable[[], Judge]",
    free: "Callable[[], str]",
) -> "ReleaseResult":
    """Clean up behind a job, release its locks and tell so; raise Refusal.

    `judge` gives a fresh look at all processes; `free` ends the isolation, and returns why not.
    """
    from gpulock.alloc.release import release_locks

    if node.settings.leftover_processes != "off":
        from gpulock.hooks.cleanup import clean_leftovers

        for line in clean_leftovers(node, ours, judge, run.deadline):
            run.log(f"{who}: {line}")
    left = free() if node.settings.isolation != "off" else ""
    released = release_locks(node, ours, judge(), run.deadline, "epilog")
    if left:
        released.kept.append(("its isolation", left))
    if released.freed:
        names = ",".join(released.freed)
        run.log(f"{who}: released {names} in {run.seconds() * 1000:.1f} ms")
    for device, why in released.kept:
        run.log(f"{who}: {device} is kept for now: {why}")
    return released


def format_grant(who: str, grant: "Grant | None", seconds: float) -> str:
    """Return the one line of a job that may start."""
    if grant is None:
        return f"{who}: no GPU asked for, {seconds * 1000:.1f} ms"
    names = ",".join([f"{d.index}={d.id}" for d in grant.devices])
    again = "" if grant.fresh else " again"
    return (
        f"{who} of {grant.owner.user}: granted{again} {names} in {seconds * 1000:.1f} ms, "
        f"{grant.waited * 1000:.1f} ms at the gate"
    )


def read_hook_settings(path: str, to_syslog: bool = True) -> Settings:
    """Load the settings; root, or a simulation's own user, and nobody else, may run a hook."""
    os.umask(0o022)  # everybody may read locks and records, whatever the daemon's umask is
    settings = read_settings(path, keep=True)
    if os.geteuid() != 0 and not settings.simulation:
        raise Refusal(BROKEN, f"the hook runs as uid {os.geteuid()}", "it must be root's")
    for fault in settings.faults:  # to the administrator: the job's owner cannot mend it
        line = f"gpulock: {fault}; correct the file"
        log_hook_line(settings, line, error=True, to_job=False, to_syslog=to_syslog)
    return settings


def observer_judge(node: Node, members: "dict[str, JobMembers] | None" = None) -> "Judge":
    """Return a judge without rules, for a release: it looks at processes and judges nobody."""
    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.process_scan import ProcessScan

    return Judge(node.boot_id, ProcessScan(node.proc), {}, members)


def unexpected_refusal(fault: BaseException) -> Refusal:
    """Return the refusal for a fault nobody foresaw, with where it happened.

    It is unknown: one user's jobs break no node. Those of several owners in a row do.
    """
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
    return UnexpectedError(f"{type(fault).__name__}: {fault}{place}")


def log_hook_line(
    settings: "Settings | None",
    sentence: str,
    error: bool,
    to_job: bool = True,
    to_syslog: bool = True,
) -> None:
    """Write one line to syslog and, for an error of the job's, to stderr; none decides anything."""
    if error and to_job:
        import select  # not for a hook that has nothing to tell

        try:  # a job's output may be a pipe that is full: the shepherd kills a hook that waits
            if select.select((), (2,), (), 0)[1]:
                line = shorten(sentence, LINE_BYTES)  # names of processes may be any bytes
                os.write(2, line.encode("utf-8", "backslashreplace") + b"\n")
        except (OSError, ValueError):
            pass
    if to_syslog and (settings is None or not settings.simulation):
        log_to_system(ERROR if error else INFO, sentence)
