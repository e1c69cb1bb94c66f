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
from gpulock.alloc.grant import retire
from gpulock.alloc.release import present
from gpulock.cli.select import SelectError, Subject, subject
from gpulock.cli.session import Refused, Session, caller, calling_shell, log
from gpulock.cli.status.node_view import stray
from gpulock.deadline import Deadline, boottime
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.node.devices import Device, overlaps
from gpulock.node.procfs import Proc
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.text.words import holder, label_of
from gpulock.workstation import client
from gpulock.workstation.process_claims import judge


class Let(NamedTuple):
    """One lock that was let go, and who still has the device open."""

    lock: Lock
    left: str


LONGEST = 1000  # characters of a reason: it stands in a note, in records and in lines


def short_enough(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
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
    "--because",
    metavar="TEXT",
    help="Why; needed with --force, kept in the log.",
    callback=short_enough,
)
@click.pass_obj
def release(
    session: Session,
    devices: tuple[str, ...],
    pid: int | None,
    job: str | None,
    force: bool,
    because: str | None,
) -> None:
    """Give GPUs back; without arguments what the calling shell holds."""
    if len([given for given in (devices, pid, job) if given]) > 1:
        raise click.UsageError("say devices, or --pid, or --job: one of them.")
    if force and not because:
        raise click.UsageError('--force needs --because "TEXT".')
    node = session.node()
    found = present(node)
    if client.is_needed(node) and not (force or job):
        for name in ask_daemon(node, found, devices, pid or calling_shell(node.proc)):
            click.echo(f"freed {label_of(name, found)}")
        return
    node = session.own_node()
    ours = chosen(found, devices, pid or calling_shell(node.proc), job)
    let = let_go(node, found, ours, force, one_line(because or ""))
    for one in let:
        click.echo(f"freed {label_of(one.lock.id, found)}{whose(one.lock)}")
        if one.left:
            click.echo(f"STILL IN USE: {one.left}", err=True)


def ask_daemon(
    node: Node, found: Sequence[Device], names: Sequence[str], pid: int
) -> tuple[str, ...]:
    """Have gpulockd free what is ours; return the ids. Raises Refused or Refusal."""
    try:
        ids = tuple(device_id(name, found) for name in names)
    except SelectError as fault:
        raise Refused(str(fault), "see gpulock status") from fault
    return client.release(node, pid, ids)


def chosen(
    found: Sequence[Device], names: Sequence[str], pid: int, job: str | None
) -> Callable[[Lock], bool]:
    """Return what tells the locks that are meant; raise Refused."""
    try:
        if names:
            ids = [device_id(name, found) for name in names]
            return lambda lock: any(overlaps(lock.id, name) for name in ids)
        what = subject(f"job {job}", found) if job else Subject(pid=pid)
    except SelectError as fault:
        raise Refused(str(fault), "see gpulock status") from fault
    return lambda lock: lock.owner is not None and what.owns(lock.owner)


def device_id(name: str, found: Sequence[Device]) -> str:
    """Return the lock id a name stands for; a full id is taken although nothing shows it."""
    meant = subject(f"gpu {name}", found).device if not is_id(name, found) else None
    return meant.id if meant else name


def is_id(name: str, found: Sequence[Device]) -> bool:
    """Return whether `name` is a lock id of a card that the driver does not show (any more)."""
    from gpulock.cli.select import match, same_place

    return not match(name, found) and same_place(name) is not None


def let_go(
    node: Node, found: list[Device], ours: Callable[[Lock], bool], force: bool, because: str
) -> list[Let]:
    """Free the locks that are `ours`, all or none; raise Refused."""
    if not node.store.exists():
        raise Refused("nothing is held on this node", "see gpulock status")
    node.store.check()
    judge_now = judge(node)
    holders = reaper.make_holders(node, found, judge_now)
    holders.of("")
    quiet = boottime()  # what the guard saw was not later
    memory = None if force else wait_for_memory(node, ours, quiet)
    with Gate(node.store.path, Deadline(node.settings.gate_timeout)):
        held = node.store.all()
        for lock in held.values():
            node.store.read_details(lock)
        locks = [lock for lock in held.values() if ours(lock)]
        if not locks:
            raise Refused("nothing of that is held", "see gpulock status")
        let = [Let(lock, left_open(lock, holders, held)) for lock in locks]
        for one in let:
            if not force:
                refuse_foreign(one, node.proc)
        kept = [(one, memory.keeps(one.lock, quiet)) for one in let] if memory else []
        for one, left in kept:
            if left:
                raise Refused(f"{one.lock.id}: {left}", "release it again in a few seconds")
        for one in let:
            how = (
                f"release --force by {caller()}: {because}" if force else f"released by {caller()}"
            )
            free(node, one, one_line(how))
    return let


def wait_for_memory(
    node: Node, ours: Callable[[Lock], bool], quiet: float
) -> memory_check.Handover | None:
    """Return what the exporter tells once it has looked again, None where CLEAN is off."""
    if node.settings.clean == "off":
        return None
    names = [lock.id for lock in node.store.all().values() if ours(lock)]
    return memory_check.wait(node, names, quiet, Deadline(node.settings.gate_timeout))


def left_open(lock: Lock, holders: device_users.Holders, held: dict[str, Lock]) -> str:
    """Return who has the device of a lock open, or nothing."""
    if lock.owner is not None:
        return device_users.open_left(lock.id, lock.owner, holders, held)
    pids = holders.of(lock.id)
    return f"process {pids[0]} has {lock.id} open" if pids else holders.blind


def refuse_foreign(one: Let, proc: Proc) -> None:
    """Raise Refused for a lock that its caller may not free, or not now."""
    record = one.lock.owner
    force = 'use --force --because "TEXT" if you must'
    if record is None or one.lock.fault:
        raise Refused(f"{one.lock.id}: {one.lock.fault or 'a claim cut short'}", force)
    if record.scheduler == "admin":
        raise Refused(f"{one.lock.id} is {holder(record)}", f"gpulock unreserve {one.lock.id}")
    if record.scheduler != "process":
        raise Refused(
            f"{one.lock.id} is held by {holder(record)}",
            f"it is freed when the job ends; {force}",
        )
    if record.uid != os.getuid():
        raise Refused(f"{one.lock.id} is held by {holder(record)}", force)
    if one.left:
        raise Refused(one.left, f"end it first; {force}")
    if runs_elsewhere(record, proc):
        raise Refused(f"process {record.pid} runs and has not called this", f"end it; {force}")


def runs_elsewhere(record: Owner, proc: Proc) -> bool:
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


def free(node: Node, one: Let, how: str) -> None:
    """Free one lock under the gate, and log a forced one; raise Refusal."""
    lock = one.lock
    if lock.fault:
        # retire leaves alone what it cannot read, and so does everybody but this command
        from gpulock.store import atomic

        if path := stray(node, lock):
            raise Refused(f"{path} is no folder, and so no lock", f"rm {path}")
        atomic.remove_folder(f"{node.store.locks_dir}/{lock.id}")
    else:
        retire(node, lock, how)
    still = f"; still open: {one.left}" if one.left else ""
    log(node.settings, one_line(f"{lock.id}{whose(lock)}: {how}{still}"))


def whose(lock: Lock) -> str:
    """Return ` (was job 12 of alice)`, or nothing for a lock without owner."""
    return f" (was {holder(lock.owner)})" if lock.owner else ""
