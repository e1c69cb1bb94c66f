# SPDX-License-Identifier: Apache-2.0
"""What the tests of Grid Engine ask of jobs, locks and processes on a lab's nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from gpulock.store.owner import parse_owner
from tests.labs.common.processes import end
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.install import PROGRAMS
from tests.labs.sge.lab import GridEngine, JobId
from tests.support.wait import LabError, wait_until

SLEEP = "exec sleep 600\n"
ENDS_QSUB = ("GLIBC_TUNABLES", "LD_AUDIT")


def on(node: str, *more: str) -> tuple[str, ...]:
    """Return the words of qsub that send a job to one node, output in one file."""
    return ("-j", "y", "-q", "gpu.q", "-l", f"h={node}", *more)


def said(gpus: Gpulock, job: JobId, name: str = "STDIN", user: str = "glalice") -> str:
    """Return what a job and its hooks printed, empty as long as there is no file."""
    try:
        path = gpus.sge.users[user].home / f"{name}.o{job}"
        return path.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return ""


def wait_said(gpus: Gpulock, job: JobId, text: str, name: str = "STDIN") -> str:
    """Wait until a job or its hooks have printed `text`; return all they printed."""

    def found() -> str:
        return said(gpus, job, name)

    return wait_until(
        lambda: told if text in (told := found()) else None,
        why=lambda: f"job {job} to print {text!r}\n{found()}",
    )


def claims(gpus: Gpulock, node: str) -> dict[str, set[str]]:
    """Return the devices that each job had on a node since `prepare`, released ones included."""
    devices: dict[str, set[str]] = {}
    for folder in ("claims", "finished"):  # one that ends meanwhile is in the second
        for place in gpus.sge.path_in(node, f"/run/gpulock.claims/{folder}").glob("[!.]*/record"):
            with contextlib.suppress(FileNotFoundError):
                record = parse_owner(place.read_text())
                devices.setdefault(record.job_id, set()).update(record.devices)
    return devices


def restart_execd(gpus: Gpulock, node: str, **changes: str) -> None:
    """Change a node's own configuration and let its execd read it."""
    for key, value in changes.items():
        gpus.sge.set_conf(key, value, host=node)
    gpus.sge.stop_execd(node)
    gpus.sge.start_execd(node)


def forget_conf(gpus: Gpulock, node: str, *keys: str) -> None:
    """Take lines out of a node's own configuration again, and let its execd read it."""
    gpus.sge.forget_conf(node, *keys)
    gpus.sge.stop_execd(node)
    gpus.sge.start_execd(node)


@contextlib.contextmanager
def sparing_execd(gpus: Gpulock, node: str) -> Generator[None]:
    """Let a node's execd leave daemonised children of a job alone, as 6.2u5 did."""
    restart_execd(gpus, node, execd_params="ENABLE_ADDGRP_KILL=false")
    yield
    gpus.sge.clear_jobs()
    forget_conf(gpus, node, "execd_params")


def start_shepherds(sge: GridEngine, command: str) -> None:
    """Let every execd start its shepherds by a command; `none` is Grid Engine's own."""
    for node in NODES:
        sge.set_conf("shepherd_cmd", command, host=node)
        sge.stop_execd(node)
    sge.start_execds(NODES)


def carriers(gid: int) -> list[int]:
    """Return the living processes that carry a supplementary group."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = (entry / "status").read_text()
                groups = status.partition("\nGroups:")[2].partition("\n")[0].split()
                if str(gid) in groups and "\nState:\tZ" not in status:
                    found.append(int(entry.name))
    return found


def end_carriers(gid: int) -> None:
    """Kill what carries a group, whatever it starts meanwhile, and wait until it is gone."""
    while pids := carriers(gid):
        end(pids)


def waiting_for(path: Path) -> str:
    """Return a job's line that waits for a file; its shell is no bash."""
    return f"until [ -e {path} ]; do sleep 0.1; done\n"


def started(gpus: Gpulock, node: str, count: int, text: str = SLEEP, *more: str) -> JobId:
    """Start a job that holds GPUs; return it once it runs."""
    job = gpus.sge.submit("glalice", *on(node, "-l", f"gpu={count}", *more), stdin=text)
    gpus.sge.wait_running(job)
    return job


def submit_args(
    gpus: Gpulock, user: str, words: Sequence[str], env: Mapping[str, str], seconds: float = 60.0
) -> JobId:
    """Submit with exactly these words and a hostile environment, set as the user."""
    pairs = [f"{name}={value}" for name, value in env.items()]
    line = ["/usr/bin/env", *pairs, str(PROGRAMS / "qsub"), "-terse", *words]
    done = gpus.sge.run_as(user, line, stdin="", seconds=seconds)
    first = done.stdout.split(".")[0].strip()
    if not first.isdigit():
        raise LabError(f"{words}: {done.stdout}{done.stderr}")
    return JobId(int(first))


def submit_env(
    gpus: Gpulock, user: str, words: Sequence[str], env: Mapping[str, str], seconds: float = 60.0
) -> JobId:
    """Submit a job with an environment; what would end qsub itself is named on its line."""
    hidden = [f"{name}={value}" for name, value in env.items() if name in ENDS_QSUB]
    shown = {name: value for name, value in env.items() if name not in ENDS_QSUB}
    given = ["-V", *(word for pair in hidden for word in ("-v", pair)), *words]
    return submit_args(gpus, user, given, shown, seconds)


def stopped_queues(gpus: Gpulock) -> dict[str, str]:
    """Return the queues of the lab that are in error."""
    return {node: state for node, state in gpus.sge.queue_states().items() if "E" in state}


@contextlib.contextmanager
def full_fifo(path: Path) -> Generator[Path]:
    """Make a FIFO of glalice's that nobody reads, and fill it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    os.chown(path, 27001, 27001)
    held = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(held, b"x" * 4096)
        yield path
    finally:
        os.close(held)


def wait_refused(gpus: Gpulock, node: str, job: JobId) -> None:
    """Wait until a prolog has put the queue of its node into error."""
    gpus.sge.wait_queue(node, "E")
    gpus.sge.wait_state(job, "qw")
