# SPDX-License-Identifier: Apache-2.0
"""`gpulock release`: give back claims of one's own processes; with --force anybody's.

Under the gate, and by the token that was judged. A device that somebody has open is not let go
without --force, which says who still has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from gpulock.alloc import device_users, memory_check, reaper
from gpulock.alloc.grant import retire_lock
from gpulock.alloc.release import devices_if_driver
from gpulock.cli.claims import socket_client
from gpulock.cli.select import SelectError, Subject, parse_subject
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    describe_caller,
    find_calling_shell,
    log_to_syslog,
)
from gpulock.cli.status.node_view import find_stray_path
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.node.procfs import Proc
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.text.words import format_device_label, format_lock_holder
from gpulock.workstation.process_claims import make_liveness_judge


class ReleaseCandidate(NamedTuple):
    """One lock that was let go, and who still has the device open."""

    lock: Lock
    left: str


LONGEST = 1000  # characters of a reason: it stands in a note, in records and in lines


def check_reason_length(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> str | None:
    """Return the reason; raise BadParameter for one that no record can hold."""
    if value is not None and len(value) > LONGEST:
        raise click.BadParameter(f"say it in {LONGEST} characters.", ctx, param)
    return value


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--pid", type=click.IntRange(min=2), help="What this process holds.")
@click.option("--job", metavar="JOB", help="What this job holds: 12, or 12.3 for a task.")
@click.option("--force", is_flag=True, help="Also what is not yours, or still in use.")
@click.option(
    "--reason",
    metavar="TEXT",
    help="Why; needed with --force, kept in the log.",
    callback=check_reason_length,
)
@click.pass_obj
def release_command(
    session: Session,
    devices: tuple[str, ...],
    pid: int | None,
    job: str | None,
    force: bool,
    reason: str | None,
) -> None:
    """Give GPUs back; without arguments what the calling shell holds."""
    if len([given for given in (devices, pid, job) if given]) > 1:
        raise click.UsageError("say devices, or --pid, or --job: one of them.")
    if force and not reason:
        raise click.UsageError('--force needs --reason "TEXT".')
    node = session.node()
    found = devices_if_driver(node)
    if socket_client.is_daemon_needed(node) and not (force or job):
        for name in release_through_daemon(
            node, found, devices, pid or find_calling_shell(node.proc)
        ):
            click.echo(f"freed {format_device_label(name, found)}")
        return
    node = session.writable_node()
    ours = make_lock_filter(found, devices, pid or find_calling_shell(node.proc), job)
    let = release_selected_locks(node, found, ours, force, one_line(reason or ""))
    for one in let:
        click.echo(f"freed {format_device_label(one.lock.id, found)}{format_past_holder(one.lock)}")
        if one.left:
            click.echo(f"STILL IN USE: {one.left}", err=True)


def release_through_daemon(
    node: Node, found: Sequence[Device], names: Sequence[str], pid: int
) -> tuple[str, ...]:
    """Have gpulockd free what is ours; return the ids. Raises Refused or Refusal."""
    try:
        ids = tuple(resolve_lock_id(name, found) for name in names)
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "see gpulock status") from fault
    return socket_client.request_daemon_release(node, pid, ids)


def make_lock_filter(
    found: Sequence[Device], names: Sequence[str], pid: int, job: str | None
) -> Callable[[Lock], bool]:
    """Return what tells the locks that are meant; raise Refused."""
    try:
        if names:
            ids = [resolve_lock_id(name, found) for name in names]
            return lambda lock: any(lock_ids_overlap(lock.id, name) for name in ids)
        what = parse_subject(f"job {job}", found) if job else Subject(pid=pid)
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "see gpulock status") from fault
    return lambda lock: lock.owner is not None and what.owns(lock.owner)


def resolve_lock_id(name: str, found: Sequence[Device]) -> str:
    """Return the lock id a name stands for; a full id is taken although nothing shows it."""
    meant = (
        parse_subject(f"gpu {name}", found).device if not is_missing_card_id(name, found) else None
    )
    return meant.id if meant else name


def is_missing_card_id(name: str, found: Sequence[Device]) -> bool:
    """Return whether `name` is a lock id of a card that the driver does not show (any more)."""
    from gpulock.cli.select import match_devices, parse_lock_id

    return not match_devices(name, found) and parse_lock_id(name) is not None


def release_selected_locks(
    node: Node, found: list[Device], ours: Callable[[Lock], bool], force: bool, reason: str
) -> list[ReleaseCandidate]:
    """Free the locks that are `ours`, all or none; raise Refused."""
    if not node.store.exists():
        raise CommandRefusedError("nothing is held on this node", "see gpulock status")
    node.store.check()
    judge_now = make_liveness_judge(node)
    holders = reaper.make_open_files(node, found, judge_now)
    holders.pids_with_open("")
    quiet = clock_boottime()  # what the guard saw was not later
    memory = None if force else wait_for_memory(node, ours, quiet)
    with Gate(node.store.path, Deadline(node.settings.gate_timeout)):
        held = node.store.read_all_locks()
        for lock in held.values():
            node.store.read_details(lock)
        locks = [lock for lock in held.values() if ours(lock)]
        if not locks:
            raise CommandRefusedError("nothing of that is held", "see gpulock status")
        let = [ReleaseCandidate(lock, describe_lock_openers(lock, holders, held)) for lock in locks]
        for one in let:
            if not force:
                refuse_foreign_lock(one, node.proc)
        kept = [(one, memory.reason_to_keep_lock(one.lock, quiet)) for one in let] if memory else []
        for one, left in kept:
            if left:
                raise CommandRefusedError(
                    f"{one.lock.id}: {left}", "release it again in a few seconds"
                )
        for one in let:
            how = (
                f"release --force by {describe_caller()}: {reason}"
                if force
                else f"released by {describe_caller()}"
            )
            free_candidate_lock(node, one, one_line(how))
    return let


def wait_for_memory(
    node: Node, ours: Callable[[Lock], bool], quiet: float
) -> memory_check.Handover | None:
    """Return the exporter's next view of the memory, None where LEFTOVER_PROCESSES is off."""
    if node.settings.leftover_processes == "off":
        return None
    names = [lock.id for lock in node.store.read_all_locks().values() if ours(lock)]
    return memory_check.wait_for_memory_sample(
        node, names, quiet, Deadline(node.settings.gate_timeout)
    )


def describe_lock_openers(
    lock: Lock, holders: device_users.OpenFiles, held: dict[str, Lock]
) -> str:
    """Return who has the device of a lock open, or nothing."""
    if lock.owner is not None:
        return device_users.remaining_device_user(lock.id, lock.owner, holders, held)
    pids = holders.pids_with_open(lock.id)
    return f"process {pids[0]} has {lock.id} open" if pids else holders.blind


def refuse_foreign_lock(one: ReleaseCandidate, proc: Proc) -> None:
    """Raise Refused for a lock that its caller may not free, or not now."""
    record = one.lock.owner
    force = 'use --force --reason "TEXT" if you must'
    if record is None or one.lock.fault:
        raise CommandRefusedError(f"{one.lock.id}: {one.lock.fault or 'a claim cut short'}", force)
    if record.scheduler == "admin":
        raise CommandRefusedError(
            f"{one.lock.id} is {format_lock_holder(record)}", f"gpulock unreserve {one.lock.id}"
        )
    if record.scheduler != "process":
        raise CommandRefusedError(
            f"{one.lock.id} is held by {format_lock_holder(record)}",
            f"it is freed when the job ends; {force}",
        )
    if record.uid != os.getuid():
        raise CommandRefusedError(f"{one.lock.id} is held by {format_lock_holder(record)}", force)
    if one.left:
        raise CommandRefusedError(one.left, f"end it first; {force}")
    if is_claim_running_elsewhere(record, proc):
        raise CommandRefusedError(
            f"process {record.pid} runs and has not called this", f"end it; {force}"
        )


def is_claim_running_elsewhere(record: Owner, proc: Proc) -> bool:
    """Return whether a claim is of a command that runs, not above us: it counts on its GPUs."""
    if record.comment != "run" or not proc.running(record.pid, record.start):
        return False
    pid = os.getpid()
    while pid > 1:
        if pid == record.pid:
            return False
        try:
            pid = proc.stat(pid).ppid
        except (OSError, ValueError):
            return True
    return True


def free_candidate_lock(node: Node, one: ReleaseCandidate, how: str) -> None:
    """Free one lock under the gate, and log a forced one; raise Refusal."""
    lock = one.lock
    if lock.fault:
        # retire leaves alone what it cannot read, and so does everybody but this command
        from gpulock.store import atomic

        if path := find_stray_path(node, lock):
            raise CommandRefusedError(f"{path} is no folder, and so no lock", f"rm {path}")
        atomic.remove_folder(f"{node.store.locks_dir}/{lock.id}")
    else:
        retire_lock(node, lock, how)
    still = f"; still open: {one.left}" if one.left else ""
    log_to_syslog(node.settings, one_line(f"{lock.id}{format_past_holder(lock)}: {how}{still}"))


def format_past_holder(lock: Lock) -> str:
    """Return ` (was job 12 of alice)`, or nothing for a lock without owner."""
    return f" (was {format_lock_holder(lock.owner)})" if lock.owner else ""
