# SPDX-License-Identifier: Apache-2.0
"""`gpulock forget-locks`: grant again on a node whose records were lost, once no job is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from grp import getgrgid

import click

from gpulock.alloc.node_view import find_lost_records
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import FREED, Reaper
from gpulock.cli.session import Session
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm.call import parse_stepd_title
from gpulock.store.boot import begin_boot
from gpulock.store.gate import Gate
from gpulock.text.words import format_lock_holder

SECONDS = 20.0
SHEPHERD, STEPD = "sge_shepherd", "slurmstepd"


@click.command()
@click.option("--force", is_flag=True, help="Although a process may still have a GPU.")
@click.pass_obj
def forget_locks_command(session: Session, force: bool) -> None:
    """Grant GPUs again on a node whose records were lost, once no job is left on it."""
    node = session.writable_node()
    if not find_lost_records(node):
        raise Refusal(INVALID_REQUEST, "no records were lost on this node", "see gpulock status")
    if not force and (left := next(list_remaining_users(node), "")):
        raise Refusal(BUSY, left, "end it first, or say --force where it has no GPU")
    node.store.check(make=True)
    with Gate(node.store, Deadline(SECONDS)):
        begin_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
    click.echo("The lost records are forgotten: GPUs that no record names may be granted again.")


def list_remaining_users(node: Node) -> Iterator[str]:
    """Give each process or lock that may still have a GPU, as a clause; what is in doubt as well.

    Raises Refusal.
    """
    judge = make_liveness_judge(node)
    yield from list_job_processes(node, judge.scan)
    try:
        devices = node.devices()
    except Refusal as refusal:
        devices = []
        if os.path.lexists(f"{node.settings.driver_root}/gpus"):
            yield refusal.why  # else no driver is loaded: none can be open
    held = node.store.read_all_locks()  # where LOCK_DIR is left, its locks have copies
    reaper = Reaper(node, judge, devices, held)
    for outcome in reaper.decide(held.values()):
        owner = outcome.lock.owner
        if outcome.act == FREED or (owner and owner.scheduler == "admin"):
            continue  # a reserve is made again from STATE_DIR
        if owner is None or not node.store.is_held(owner.token):  # with its record it goes on
            holder = f" by {format_lock_holder(owner)}" if owner else ""
            yield f"{outcome.lock.id} is held{holder}: {outcome.reason}"
    opened, blind = reaper.files.users_by_device(None)
    for device, pids in opened.items():
        yield f"process {pids[0]} has {device} open"
    if blind := blind or judge.scan.why_blind_about(None):
        yield blind


def list_job_processes(node: Node, scan: ProcessScan) -> Iterator[str]:
    """Give each shepherd and step daemon, and what a job or a user's claim started."""
    statuses = scan.statuses()
    for pid, status in statuses.items():
        if status.name == SHEPHERD or (status.name == STEPD and is_step_daemon(node, pid)):
            yield f"process {pid} ({status.name}) runs a job"
        elif node.settings.sge_root and (nameless := next(filter(is_nameless, status.groups), 0)):
            words = "which has no name, as one of a job"  # nothing else marks what a job left
            yield f"process {pid} ({status.name}) carries group {nameless}, {words}"
    for uid in sorted({status.uids[0] for status in statuses.values() if not status.kernel}):
        started, missed = scan.started_as(uid)
        for pid, one in started.items():
            if one.token or (one.job and one.node and not one.is_hook()):
                job = f"job {one.job.decode()}" if one.job.isdigit() else "a job"
                whose = "with a user's claim" if one.token else f"by {job}"
                yield f"process {pid} ({statuses[pid].name}) was started {whose}"
        if missed:
            yield missed


@cache
def is_nameless(gid: int) -> bool:
    """Return whether a group has no name: execd's of a job have none."""
    try:
        return not getgrgid(gid)
    except (KeyError, OverflowError):
        return True


def is_step_daemon(node: Node, pid: int) -> bool:
    """Return whether a slurmstepd is a job's, and not the one that keeps Slurm's cgroup."""
    try:
        return bool(parse_stepd_title(node.proc.read_memory(pid, "cmdline"))[0])
    except (OSError, ValueError):
        return True
