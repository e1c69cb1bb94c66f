# SPDX-License-Identifier: Apache-2.0
"""`gpulock release`: give back claims of one's own processes; with --force anybody's.

Under the gate, and by the token that was judged. A device that somebody has open is not let go
without --force, which says who still has it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from gpulock.alloc.process_owner import is_command_running_elsewhere
from gpulock.alloc.process_tree import ProcessTree
from gpulock.alloc.reaper import Reaper, free_locks
from gpulock.alloc.release import is_same_claim
from gpulock.cli.claims import socket_client
from gpulock.cli.select import (
    SelectError,
    Subject,
    match_devices,
    match_one_device,
    parse_job,
    parse_lock_id,
)
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    describe_caller,
    find_calling_shell,
    log_to_syslog,
)
from gpulock.cli.status.status_view import find_stray_path
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, Refusal, one_line
from gpulock.job import environment
from gpulock.job.mps import stale_mps_names
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device, lock_ids_overlap
from gpulock.node.procfs import Proc
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import grants
from gpulock.store.gate import LONGEST_WAIT, Gate
from gpulock.store.locks import Lock, LockStore
from gpulock.text.words import format_device_label, format_lock_holder


class ReleaseCandidate(NamedTuple):
    """One lock that was let go, and who still has the device open."""

    lock: Lock
    left: str


FORCE_HINT = 'use --force --reason "TEXT" if you must'
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
@click.option("--pid", type=click.IntRange(min=2), help="Release the GPUs of this process.")
@click.option("--job", metavar="JOB", help="Release the GPUs of this job: 12, or 12.3 for a task.")
@click.option("--force", is_flag=True, help="Release also what is not yours or still in use.")
@click.option(
    "--reason",
    metavar="TEXT",
    help="Reason; needed with --force, kept in the log.",
    callback=check_reason_length,
)
@click.option("--export", is_flag=True, help="Print unset lines for eval.")
@click.pass_obj
def release_command(
    session: Session,
    /,
    devices: tuple[str, ...],
    pid: int | None,
    job: str | None,
    export: bool,
    **forced: Any,
) -> None:
    """Release GPUs; without arguments those of the calling shell.

    \b
    eval "$(gpulock release --export)"
    """
    force, reason = bool(forced["force"]), str(forced["reason"] or "")
    if len([given for given in (devices, pid, job is not None) if given]) > 1:
        raise click.UsageError("give one of DEVICE, --pid and --job.")
    if force and not reason.strip():
        raise click.UsageError('--force needs --reason "TEXT".')
    node = session.node()
    found = node.devices_if_driver()
    holder = pid or find_calling_shell(node.proc)
    try:
        ids = tuple(resolve_lock_id(name, found) for name in devices)
        ours = make_lock_filter(ids, holder, job)
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "see gpulock status") from fault
    if socket_client.is_daemon_needed(node) and not force and job is None:
        freed = socket_client.request_daemon_release(node, holder, ids)
        for name in freed:
            click.echo(f"freed {format_device_label(name, found)}", err=export)
        warn_of_stale_mask(node, found, freed, export)
        return
    node = session.writable_node()
    let = release_selected_locks(node, found, ours, force, one_line(reason))
    for one in let:
        freed_text = f"{format_device_label(one.lock.id, found)}{format_past_holder(one.lock)}"
        click.echo(f"freed {freed_text}", err=export)
        if one.left:
            click.echo(f"STILL IN USE: {one.left}", err=True)
    warn_of_stale_mask(node, found, [one.lock.id for one in let], export)


def warn_of_stale_mask(
    node: Node, found: Sequence[Device], freed: Sequence[str], export: bool
) -> None:
    """Say what to unset where the calling shell's mask still names a freed device.

    With `export` it is printed for the shell to do so.
    """
    shown = os.environ.get("GPULOCK_DEVICES", "").split(",")
    cards = {name.partition(SHARE)[0] for name in freed}
    if not any(device.uuid in shown for device in found if device.id in cards and device.uuid):
        return
    names = {*environment.grant_variable_names()} & os.environ.keys()
    names |= stale_mps_names(os.environ.items(), node.settings.mps_dir)
    line = f"unset {' '.join(sorted(names))}"
    click.echo(line if export else f"gpulock: this shell still uses them: {line}", err=not export)


def make_lock_filter(ids: Sequence[str], pid: int, job: str | None) -> Callable[[Lock], bool]:
    """Return what tells the locks that are meant; raise SelectError."""
    if ids:
        return lambda lock: any(lock_ids_overlap(lock.id, name) for name in ids)
    what = Subject(pid=pid) if job is None else parse_job(job)
    return lambda lock: lock.owner is not None and what.owns(lock.owner)


def resolve_lock_id(name: str, found: Sequence[Device]) -> str:
    """Return the lock id a name stands for; a full id is taken although nothing shows it."""
    if not match_devices(name, found) and parse_lock_id(name) is not None:
        return name  # of a card that the driver does not show (any more)
    return match_one_device(name, found).id


def release_selected_locks(
    node: Node, found: list[Device], ours: Callable[[Lock], bool], force: bool, reason: str
) -> list[ReleaseCandidate]:
    """Free the locks that are `ours`, all or none; raise Refused or Refusal."""
    require_claims(node.store)
    reaper = Reaper(node, make_liveness_judge(node), found, {})
    seen = node.store.read_all_locks()
    reaper.look([] if force else [lock for lock in seen.values() if ours(lock)])
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        reaper.read_locks()
        locks = [lock for lock in reaper.held.values() if ours(lock)]
        if not force:  # what was claimed since has not been looked at
            locks = [one for one in locks if not one.owner or is_same_claim(seen.get(one.id), one)]
        if not locks:
            raise CommandRefusedError("no matching claim", "see gpulock status")
        let = [ReleaseCandidate(lock, reaper.device_user(lock)) for lock in locks]
        if force:
            for one in let:
                force_lock(node, one, f"release --force by {describe_caller()}: {reason}")
        else:
            give_back_own_locks(reaper, let)
    return let


def require_claims(store: LockStore) -> None:
    """Raise Refused where nothing was ever claimed, Refusal where LOCK_DIR is not to be trusted."""
    if not store.exists():
        raise CommandRefusedError("nothing is held on this node", "see gpulock status")
    store.check(make=True)


def give_back_own_locks(reaper: Reaper, let: list[ReleaseCandidate]) -> None:
    """Free the caller's locks, all or none, gate held; raise Refused or Refusal."""
    for one in let:
        refuse_foreign_lock(one, reaper.node.proc)
    how = one_line(f"released by {describe_caller()}")
    try:
        locks = [one.lock for one in let]
        reaper.give_back(locks, how, lambda lock: log_release(reaper.node, lock, how))
    except Refusal as refusal:
        if refusal.kind != BUSY:
            raise
        raise CommandRefusedError(refusal.why, f"{refusal.do}; {FORCE_HINT}") from refusal


def refuse_foreign_lock(one: ReleaseCandidate, proc: Proc) -> None:
    """Raise Refused for a lock that its caller may not free, or not now."""
    record = one.lock.owner
    if record is None or one.lock.fault:
        raise CommandRefusedError(f"{one.lock.id}: {one.lock.fault}", FORCE_HINT)
    if record.scheduler == "admin":
        raise CommandRefusedError(
            f"{one.lock.id} is {format_lock_holder(record)}", f"gpulock unreserve {one.lock.id}"
        )
    if record.scheduler != "process":
        raise CommandRefusedError(
            f"{one.lock.id} is held by {format_lock_holder(record)}",
            f"it is freed when the job ends; {FORCE_HINT}",
        )
    if record.uid != os.getuid():
        raise CommandRefusedError(
            f"{one.lock.id} is held by {format_lock_holder(record)}", FORCE_HINT
        )
    if is_command_running_elsewhere(record, os.getpid(), ProcessTree(proc)):
        raise CommandRefusedError(
            f"held by running process {record.pid}; release it from there",
            f"or end it; {FORCE_HINT}",
        )


def force_lock(node: Node, one: ReleaseCandidate, how: str) -> None:
    """Free one lock under the gate, whatever is said of it, and log it; raise Refusal."""
    lock = one.lock
    if lock.fault and lock.owner is None:
        if path := find_stray_path(node, lock):
            why = f"{path} is not a directory, so it is no lock"
            raise CommandRefusedError(why, f"rm {shlex.quote(path)}")
        grants.remove_lock(node.store, lock.id)
    else:
        free_locks(node, [lock], one_line(how))
    log_release(node, lock, f"{how}; still open: {one.left}" if one.left else how)


def log_release(node: Node, lock: Lock, how: str) -> None:
    """Log who released a lock, and how."""
    log_to_syslog(node.settings, one_line(f"{lock.id}{format_past_holder(lock)}: {how}"))


def format_past_holder(lock: Lock) -> str:
    """Return ` (was job 12 of alice)`, or nothing for a lock without owner."""
    return f" (was {format_lock_holder(lock.owner)})" if lock.owner else ""
