# SPDX-License-Identifier: Apache-2.0
"""Spool jobs as Grid Engine's execd does, without a Grid Engine (SoGE 8.1.9 as Debian ships it).

Below the node: `sge/spool/node/active_jobs/J.T` with `config`, `environment` and `pe_hostfile`,
and `sge/spool/node/jobs/AA/BBBB/CCCC.T`, the packed job. T is the task, 1 where there is none.
"""

from __future__ import annotations

import functools
import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpulock.simulate.driver import FOLDER_MODE, Tree, write_tree
from tests.support.packed_job import ResourceRequest, son_job

SPOOL = "sge/spool/node"
RECORDED = Path(__file__).parent / "data/sge-8.1.9"
USERS = ("TERM", "FOO", "EMPTY")  # of `qsub -v`


@dataclass(frozen=True)
class SimulatedJob:
    """One task of a job on this host. `task_id` 0: not an array job.

    `variables` are those of `qsub -v`; `hosts` the granted hosts with their slots, this node's
    first. `add_grp_id` 0: no additional group, which only root can give.
    """

    job_id: int
    command: tuple[str, ...]
    task_id: int = 0
    name: str = "job"
    owner: str = field(default_factory=lambda: job_owner_name(os.getuid()))
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    queue: str = "gpu.q"
    pe: str = ""
    hosts: tuple[tuple[str, int], ...] = (("node", 1),)
    resources: tuple[ResourceRequest, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    cwd: str = "/"
    add_grp_id: int = 0

    @property
    def key(self) -> str:
        """Return `J.T`, the name of the spool folder."""
        return f"{self.job_id}.{self.task_id or 1}"

    @property
    def host(self) -> str:
        """Return this node's name in Grid Engine."""
        return self.hosts[0][0]

    @property
    def slots(self) -> int:
        """Return NSLOTS: the slots on all hosts."""
        return sum(slots for _, slots in self.hosts)


@dataclass(frozen=True)
class SpooledJob:
    """Where a job lies: its spool folder, execd's packed copy, its temporary folder, its output."""

    job: SimulatedJob
    folder: Path
    job_file: Path
    tmpdir: Path
    output: Path

    def hook_environ(self) -> dict[str, str]:
        """Return what the configured `env -i` leaves of a hook's environment."""
        job = self.job
        own = {"JOB_ID": str(job.job_id), "SGE_TASK_ID": str(job.task_id), "QUEUE": job.queue}
        return {"PATH": "/usr/bin:/bin", **own}

    def read_environment(self) -> dict[str, str]:
        """Return the job's environment file, as the prolog may have left it."""
        lines = (self.folder / "environment").read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}


def job_owner_name(uid: int) -> str:
    """Return the name of a user, its number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def packed_job_path(job_id: int, task_id: int) -> str:
    """Return the packed job's path below the spool (libs/uti/sge_spool.c, get_spool_dir_parts)."""
    first, second, third = job_id // 10**8 % 10**4, job_id // 10**4 % 10**4, job_id % 10**4
    return f"jobs/{first:02d}/{second:04d}/{third:04d}.{task_id or 1}"


def spool_job(node: Path, job: SimulatedJob) -> SpooledJob:
    """Write a job's files below the folder of a simulated node.

    A job that is spooled already raises FileExistsError.
    """
    spool, sge = node / SPOOL, node / "sge"
    folder = spool / "active_jobs" / job.key
    tmpdir = sge / "tmp" / f"{job.key}.{job.queue}"
    task = f".{job.task_id}" if job.task_id else ""
    output = sge / "output" / f"{job.name}.o{job.job_id}{task}"
    spooled = SpooledJob(
        job, folder, spool / packed_job_path(job.job_id, job.task_id), tmpdir, output
    )
    active: Tree = {
        f"active_jobs/{job.key}/config": format_shepherd_config(spooled).encode(),
        f"active_jobs/{job.key}/environment": format_job_environment(spooled).encode(),
        f"active_jobs/{job.key}/pe_hostfile": format_pe_hostfile(job).encode(),
        packed_job_path(job.job_id, job.task_id): pack_simulated_job(job),
    }
    for parent in (sge, sge / "spool", spool, sge / "output", sge / "tmp", tmpdir):
        parent.mkdir(FOLDER_MODE, exist_ok=True)
        parent.chmod(FOLDER_MODE)
    if os.geteuid() == 0:
        os.chown(tmpdir, job.uid, job.gid)
    write_tree(spool, {"active_jobs": None, "jobs": None, **active})
    return spooled


def pack_simulated_job(job: SimulatedJob) -> bytes:
    """Return execd's copy of a job."""
    about: dict[int, object] = {
        **{0: job.job_id, 1: job.name, 14: job.command[0], 20: job.owner, 21: job.uid},
        **{22: str(job.gid), 23: job.gid, 25: job.cwd, 51: job.pe},
    }
    return son_job(
        about,
        job.resources,
        dict(job.variables).items(),
        job.command[1:],
        job.task_id or 1,
        (job.queue, job.host, job.hosts[0][1]),
    )


@functools.cache
def read_recorded(name: str) -> dict[str, str]:
    """Return the pairs of a file that a real execd wrote, but for those of the user's own."""
    lines = (RECORDED / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line.split("=")[0] not in USERS)


def fill_in(job: SimulatedJob, kind: str, own: Mapping[str, object]) -> str:
    """Return a file as a real execd wrote it of such a job, with this job's own values."""
    recorded = read_recorded(f"{'parallel' if job.pe else 'array'}.{kind}")
    assert own.keys() <= recorded.keys()
    return "".join(f"{key}={own.get(key, text)}\n" for key, text in recorded.items())


def format_shepherd_config(spooled: SpooledJob) -> str:
    """Return what execd tells the shepherd."""
    job = spooled.job
    own: dict[str, object] = {
        "add_grp_id": job.add_grp_id,
        "stdout_path": spooled.output,
        "stderr_path": spooled.output,
        "merge_stderr": 1,
        "tmpdir": spooled.tmpdir,
        "no_shell": 1,
        "shell_path": "/bin/sh",
        "script_file": job.command[0],
        "job_owner": job.owner,
        "cwd": job.cwd,
        "prolog": "NONE",
        "epilog": "NONE",
        "pe": job.pe or "none",
        "pe_slots": job.slots,
        "host_slots": job.hosts[0][1],
        **({"pe_hostfile": spooled.folder / "pe_hostfile"} if job.pe else {}),
        "queue": job.queue,
        "host": job.host,
        "job_name": job.name,
        "job_id": job.job_id,
        "ja_task_id": job.task_id,
        "submission_time": int(time.time()),
        "njob_args": len(job.command) - 1,
        "admin_user": job.owner,
    }
    text = fill_in(job, "config", own)
    words = "".join(f"job_arg{n}={word}\n" for n, word in enumerate(job.command) if n)
    return text.replace("job_arg1=4\n", words)


def format_job_environment(spooled: SpooledJob) -> str:
    """Return the job's environment as execd spools it: the user's variables, then its own.

    A value is on one line, its line feeds and backslashes written out.
    """
    job = spooled.job
    task = str(job.task_id) if job.task_id else "undefined"
    own: dict[str, object] = {
        "PATH": f"{spooled.tmpdir}:/usr/local/bin:/bin:/usr/bin",
        **dict.fromkeys(("REQNAME", "JOB_NAME", "REQUEST"), job.name),
        **dict.fromkeys(("USER", "LOGNAME"), job.owner),
        **dict.fromkeys(("TMPDIR", "TMP"), spooled.tmpdir),
        **dict.fromkeys(("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST"), task),
        "SGE_TASK_STEPSIZE": "1" if job.task_id else "undefined",
        "SHELL": "/bin/sh",
        "JOB_SCRIPT": job.command[0],
        "HOSTNAME": job.host,
        "QUEUE": job.queue,
        "JOB_ID": job.job_id,
        "NQUEUES": len(job.hosts),
        "NSLOTS": job.slots,
        "NHOSTS": len(job.hosts),
        **({"PE": job.pe, "PE_HOSTFILE": spooled.folder / "pe_hostfile"} if job.pe else {}),
        "SGE_JOB_SPOOL_DIR": spooled.folder,
    }
    escaped = [
        (key, text.replace("\\", "\\\\").replace("\n", "\\n")) for key, text in job.variables
    ]
    return "".join(f"{key}={text}\n" for key, text in escaped) + fill_in(job, "environment", own)


def format_pe_hostfile(job: SimulatedJob) -> str:
    """Return host, slots, queue instance and processors, one host a line."""
    return "".join(f"{host} {slots} {job.queue}@{host} UNDEFINED\n" for host, slots in job.hosts)
