# SPDX-License-Identifier: Apache-2.0
"""Random hostile jobs beside honest ones: these run once, no queue stops, nothing is left behind.

Three ways of Grid Engine's own are out of gpulock's reach, and not tried: an output file that is a
FIFO without a reader, the pid file of a qrsh task in its TMPDIR, and as many processes as the node
can have (docs/facts/inputs.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.labs.both.fair import Fair
from tests.labs.both.sge_site import SgeSite
from tests.labs.common.hostile_jobs import Hostile, hostile_job
from tests.labs.common.installed import SOAK, reap, script
from tests.labs.sge.cluster import NODES
from tests.labs.sge.confined import isolated
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import full_fifo, on, stopped_queues, submit_env
from tests.support.wait import LabError, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE = NODES[0]
HOSTILE = "glalice"
JOBS: Final = 600 if SOAK else 20  # of each user, at least, in each of three settings
PROCESSES: Final = "H_MAXPROC=4000"  # of a user; a shepherd that cannot fork stops its queues
FORGED: Final = "x\nprolog=root@/bin/false\ny="
OWN: Final[Mapping[str, str]] = {  # {{ is a brace
    "writes its exit status": (
        "for i in {{1..50}}; do for n in 7 8 36; do echo $n >$SGE_JOB_SPOOL_DIR/exit_status; done;"
        " sleep 0.02; done & sleep 0.5"
    ),
    "writes others' exit status": (
        "cd $SGE_JOB_SPOOL_DIR/..; for i in {{1..200}}; do"
        " for f in */exit_status; do echo 7 >$f; done; sleep 0.005; done 2>&-"
    ),
    "suspends itself": "qmod -sj $JOB_ID; sleep 1; qmod -usj $JOB_ID; sleep 1",
    "runs again": "qmod -rj $JOB_ID; sleep 2",
    "deletes itself": "qdel $JOB_ID; sleep 2",
    "alters itself": "qalter -M $'x\\nprolog=root@/bin/false\\ny=' -ac a=b $JOB_ID; exit 99",
    "starts tasks": (
        "for i in 1 2 3; do timeout 3 qrsh -inherit $HOSTNAME sleep 1 & done;"
        " cd / && timeout 3 qrsh -inherit -cwd $HOSTNAME 'kill -9 -1'; wait"
    ),
    "leaves a task": "timeout 1 qrsh -inherit $HOSTNAME 'setsid sleep 3 </dev/null &'; true",
    "removes its folders": "rm -rf $TMPDIR; mkdir here && cd here && rmdir ../here; sleep 0.3",
    "lives on as no child": "(setsid setsid bash -c 'cd /; sleep 4' <&- >&- 2>&- &) ; kill -9 $$",
}
# Words of qsub, and what they try; {home} is the user's.
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "": (),
    "an array": ("-t", "1-3"),
    "a parallel job": ("-pe", "smp", "2"),
    "a forged mail address": ("-M", FORGED),
    "a forged folder": ("-o", f"/tmp/{FORGED}"),
    "a full file": ("-o", "/dev/full"),
    "a FIFO that is full": ("-o", "{home}/full"),
    "a folder that is gone": ("-wd", "{home}/gone"),
    "an output file that is a folder": ("-o", "/"),
    "no output folder": ("-o", "/nonexistent/x"),
    "a shell that is none": ("-S", "/dev/null"),
    "no memory": ("-l", "h_vmem=1"),
    "little memory": ("-l", "h_vmem=20M,s_vmem=10M"),
    "no stack": ("-l", "h_stack=1"),
    "no files": ("-l", "h_fsize=0"),
    "no time": ("-l", "h_cpu=1,s_cpu=1"),
    "one second": ("-l", "h_rt=1"),
    "a notice": ("-notify", "-r", "y"),
    "a fraction": ("-l", "gpuj=1"),
    "a checkpoint": ("-c", "sx"),
}


class SgeFair(Fair):
    """An execution host."""

    jobs = JOBS
    longest = 50

    def __init__(self, gpus: Gpulock, devices: Sequence[Path]) -> None:
        super().__init__(SgeSite(gpus), devices)
        self.gpus = gpus
        self.sge = gpus.sge

    def run(self) -> None:
        """Let both submit jobs, wait until the honest ones have run, and judge."""
        with full_fifo(self.sge.users[HOSTILE].home / "full"):
            self.sge.set_conf("execd_params", PROCESSES)
            try:
                super().run()
                self.expect_all_ran()
            finally:  # as long as the FIFO has a reader: else a hook waits in it for ever
                self.sge.clear_jobs()
                spool = self.sge.lab / "spool" / NODE / "active_jobs"
                wait_until(
                    lambda: not list(spool.iterdir()),
                    why=lambda: f"every shepherd to have ended\n{list(spool.iterdir())}",
                )
                self.sge.set_conf("execd_params", "none")

    def queue(self) -> list[tuple[str, int]]:
        lines = [line.split() for line in self.sge.qstat("-u", "*").splitlines()[2:]]
        return [(fields[3], int(fields[0])) for fields in lines]

    def is_healthy(self) -> bool:
        return stopped_queues(self.gpus) == {}

    def submit_hostile(self) -> None:
        """Submit a job of the zoo; one that kills all of its user's processes may kill qsub."""
        one: Hostile = hostile_job(self.rng, self.devices, "/run/gpulock", OWN)
        words = self.rng.choice(sorted(WORDS)) if self.rng.random() < 0.6 else ""
        words = "a parallel job" if "task" in one.name else words
        home = self.sge.users[HOSTILE].home
        given = [word.format(home=home) for word in WORDS[words]]
        argument = [FORGED] * (self.rng.random() < 0.1)
        path = script(self.gpus, f"hostile{len(self.tried)}", one.script)
        asked = ["-l", f"gpu={one.gpus}"] * bool(one.gpus)
        life = (
            self.rng.uniform(self.longest / 12, self.longest)
            if self.rng.random() < 0.3
            else self.longest
        )
        with contextlib.suppress(LabError, OSError):  # the kernel passes no such environment
            job = submit_env(
                self.gpus,
                HOSTILE,
                [*on(NODE), *asked, "-N", "hostile", *given, str(path), *argument],
                one.env,
                seconds=10,
            )
            self.tried[job] = (f"{one.name}, {words}", self.looks + life)

    def no_process_left(self) -> bool:
        """Return whether the hostile user has no process.

        One of a job without GPUs, which one of its user's jobs has stopped, is nobody's to end:
        Grid Engine leaves what has left its job's session. It goes on, and ends by itself.
        """
        left = processes_of(self.sge.users[HOSTILE].uid)
        for one in left:
            if one.info["status"] == psutil.STATUS_STOPPED:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
        return not left

    def expect_all_ran(self) -> None:
        """Expect that all honest jobs ran once, and that nothing is left of any job."""
        super().expect_all_ran()
        assert len(self.journal.holds()) == len(self.asked), "one ran twice"
        self.sge.clear_jobs()
        wait_until(
            self.no_process_left,
            why=lambda: f"no process to be left\n{processes_of(self.sge.users[HOSTILE].uid)!s}",
        )
        self.expect_nothing()


def processes_of(uid: int) -> list[psutil.Process]:
    """Return the living processes of a user."""
    every = psutil.process_iter(["uids", "status", "cmdline"])
    mine = [one for one in every if one.info["uids"].real == uid]
    return [one for one in mine if one.info["status"] != psutil.STATUS_ZOMBIE]


def test_honest_jobs_all_run_beside_hostile_ones(guarded: Gpulock) -> None:
    """Tried: the zoo of tests/labs/common/hostile_jobs.py and Grid Engine's own, at random.

    Stopped by: a lock is held by its owner's processes alone, and shepherd_cmd, hooks and epilog
    believe nothing that a job's owner can write.
    """
    guarded.configure(NODE, LEFTOVER_PROCESSES="kill")
    devices = [guarded.drivers / NODE / f"dev/nvidia{minor}" for minor in range(GPUS)]
    for device in devices:
        device.chmod(0o666)
    SgeFair(guarded, devices).run()


def test_honest_jobs_all_run_beside_hostile_ones_where_jobs_are_confined(guarded: Gpulock) -> None:
    """Tried: the same with ISOLATION=cgroup. Stopped by: as above, and by the job's own cgroup."""
    with isolated(guarded) as site:
        site.configure(LEFTOVER_PROCESSES="kill")
        SgeFair(guarded, [site.dev / f"nvidia{minor}" for minor in range(GPUS)]).run()
        wait_until(
            lambda: reap(guarded, NODE) and not site.left(),
            why=lambda: f"no cgroup of a job to be left\n{site.left()}",
        )
