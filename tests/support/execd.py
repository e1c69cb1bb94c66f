# SPDX-License-Identifier: Apache-2.0
"""Spool jobs as Grid Engine's execd does, without a Grid Engine (SoGE 8.1.9 as Debian ships it).

Below the node: `sge/spool/node/active_jobs/J.T` with `config`, `environment` and `pe_hostfile`,
and `sge/spool/node/jobs/AA/BBBB/CCCC.T`, the packed job. T is the task, 1 where there is none.
"""

from __future__ import annotations

import os
import pwd
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpulock.simulate.tree import FOLDER_MODE, Tree, write_tree
from tests.support.packed_job import ResourceRequest, son_job

SPOOL = "sge/spool/node"


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


def format_shepherd_config(spooled: SpooledJob) -> str:
    """Return what execd tells the shepherd, in the real file's order; limits are left out."""
    job = spooled.job
    pairs: list[tuple[str, object]] = [
        ("add_grp_id", job.add_grp_id),
        ("stdout_path", spooled.output),
        ("stderr_path", spooled.output),
        ("stdin_path", "/dev/null"),
        ("merge_stderr", 1),
        ("tmpdir", spooled.tmpdir),
        ("handle_as_binary", 1),
        ("no_shell", 1),
        ("priority", 0),
        ("shell_path", "/bin/sh"),
        ("script_file", job.command[0]),
        ("job_owner", job.owner),
        ("min_gid", 0),
        ("min_uid", 0),
        ("cwd", job.cwd),
        ("script_timeout", 120),
        ("pe", job.pe or "none"),
        ("pe_slots", job.slots),
        ("host_slots", job.hosts[0][1]),
    ]
    if job.pe:
        pairs.append(("pe_hostfile", spooled.folder / "pe_hostfile"))
    pairs += [
        ("queue", job.queue),
        ("host", job.host),
        ("processors", "UNDEFINED"),
        ("binding", "NULL"),
        ("job_name", job.name),
        ("job_id", job.job_id),
        ("ja_task_id", job.task_id),
        ("account", "sge"),
        ("submission_time", int(time.time())),
        ("notify", 0),
        ("acct_project", "none"),
        ("njob_args", len(job.command) - 1),
        *((f"job_arg{n}", text) for n, text in enumerate(job.command) if n),
        ("admin_user", job.owner),
        ("pty", 0),
        ("inherit_env", 1),
        ("enable_addgrp_kill", 1),
    ]
    return "".join(f"{key}={value}\n" for key, value in pairs)


def format_job_environment(spooled: SpooledJob) -> str:
    """Return the job's environment as execd spools it: the user's variables, then its own."""
    job = spooled.job
    task = str(job.task_id) if job.task_id else "undefined"
    own: dict[str, object] = {
        "PATH": f"{spooled.tmpdir}:/usr/local/bin:/bin:/usr/bin",
        "REQNAME": job.name,
        "SHELL": "/bin/sh",
        "USER": job.owner,
        "LOGNAME": job.owner,
        "JOB_NAME": job.name,
        "JOB_SCRIPT": job.command[0],
        "REQUEST": job.name,
        "HOSTNAME": job.host,
        "QUEUE": job.queue,
        "JOB_ID": job.job_id,
        "ENVIRONMENT": "BATCH",
        "NQUEUES": len(job.hosts),
        "NSLOTS": job.slots,
        "NHOSTS": len(job.hosts),
        "RESTARTED": 0,
        "TMPDIR": spooled.tmpdir,
        "TMP": spooled.tmpdir,
        **({"PE": job.pe, "PE_HOSTFILE": spooled.folder / "pe_hostfile"} if job.pe else {}),
        "SGE_CELL": "default",
        "SGE_TASK_ID": task,
        "SGE_TASK_FIRST": task,
        "SGE_TASK_LAST": task,
        "SGE_TASK_STEPSIZE": "1" if job.task_id else "undefined",
        "SGE_ACCOUNT": "sge",
        "SGE_JOB_SPOOL_DIR": spooled.folder,
    }
    pairs = [*job.variables, *((name, str(value)) for name, value in own.items())]
    return "".join(f"{name}={escape_spooled_value(value)}\n" for name, value in pairs)


def escape_spooled_value(value: str) -> str:
    r"""Return a value as it stands in `environment`: one line, `\n` and `\\` written out."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def format_pe_hostfile(job: SimulatedJob) -> str:
    """Return host, slots, queue instance and processors, one host a line."""
    return "".join(f"{host} {slots} {job.queue}@{host} UNDEFINED\n" for host, slots in job.hosts)
