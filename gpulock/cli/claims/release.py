# SPDX-License-Identifier: Apache-2.0
"""`gpulock release`: give back claims of one's own processes; with --force anybody's.

Under the gate, and by the token that was judged. A device that somebody has open is not let go
without --force, which says who still has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from gpulock.alloc.claim import Grant
from gpulock.alloc.environs import CLAIM
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import Reaper, free_locks
from gpulock.alloc.same_job import granted_devices
from gpulock.cli.claims import socket_client
from gpulock.cli.claims.acquire import format_export_lines
from gpulock.cli.claims.run import list_outer_claims
from gpulock.cli.select import Subject, parse_job, resolve_lock_id
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    describe_caller,
    find_calling_shell,
    log_to_syslog,
    name_config,
)
from gpulock.cli.status.evidence import printable_process_name
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal, one_line
from gpulock.job import environment
from gpulock.job.mps import stale_mps_names
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import grants
from gpulock.store.gate import LONGEST_WAIT, Gate
from gpulock.store.locks import Lock
from gpulock.text.words import (
    format_device_label,
    format_device_list,
    format_lock_holder,
    name_devices,
)
from gpulock.workstation.user_release import release_unused

FORCE_HINT = 'use --force --reason "TEXT" if you must'
REASON_CHARACTERS = 1000  # characters of a reason: it stands in a note, in records and in lines


def check_reason(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Return the reason in one line, nothing where none is given.

    Raises BadParameter for one that is empty, or that no record can hold.
    """
    if value is not None and not 0 < len(value.strip()) <= REASON_CHARACTERS:
        raise click.BadParameter(f"say why, in {REASON_CHARACTERS} characters.", ctx, param)
    return one_line(value or "")


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--pid", type=click.IntRange(min=2), help="Release the GPUs of this process.")
@click.option("--job", metavar="JOB", help="Release the GPUs of this job: 12, or 12.3 for a task.")
@click.option("--force", is_flag=True, help="Release also what is not yours or still in use.")
@click.option(
    "--reason",
    metavar="TEXT",
    help="Reason; needed with --force, kept in the log.",
    callback=check_reason,
)
@click.option("--export", is_flag=True, help="Print what a shell is to evaluate.")
@click.pass_obj
def release_command(
    session: Session,
    /,
    devices: tuple[str, ...],
    pid: int | None,
    job: str | None,
    export: bool,
    **forced: Any,  # force, reason
) -> None:
    """Release GPUs; without arguments those of the calling shell.

    \b
    eval "$(gpulock release --export)"
    """
    force, reason = bool(forced["force"]), str(forced["reason"])
    if len([given for given in (devices, pid, job is not None) if given]) > 1:
        raise click.UsageError("give one of DEVICE, --pid and --job.")
    if force and not reason:
        raise click.UsageError('--force needs --reason "TEXT".')
    node = session.node()
    known = node.devices_if_driver()
    if export:
        tell_stale_variables(node, known, export)  # also where nothing is left to be released
    meant = Subject(pid=pid or find_calling_shell(node.proc)) if job is None else parse_job(job)
    ids = tuple(resolve_lock_id(name, known) for name in devices)
    ours = make_lock_filter(ids, meant)
    held = node.store.read_all_locks()
    if socket_client.is_daemon_needed(node):
        if force:
            raise CommandRefusedError(
                "--force is for root here", "leave it out to release your own"
            )
        if job and not meant.pid:
            raise CommandRefusedError("--job is for root here", "use --pid PID, or DEVICE")
        if not (ids or pid or job):
            refuse_inner_command(node, meant)
        given = socket_client.request_daemon_release(node, meant.pid, ids)
        let = [held.get(name, Lock(name, None, "")) for name in given]
    else:
        node = session.writable_node()
        if not held:
            raise CommandRefusedError("nothing is held on this node", "see gpulock status")
        node.store.check(make=True)
        let = force_locks(node, known, ours, reason) if force else release_own_locks(node, ours)
    for lock in let:
        label = format_device_label(lock.id, known)
        click.echo(f"freed {label}{format_past_holder(lock)}", err=export)
    warn_of_started_processes(node, let)
    tell_stale_variables(node, known, export)


def refuse_inner_command(node: Node, meant: Subject) -> None:
    """Raise Refusal where the calling shell has no claim, but is in one."""
    around = list_outer_claims(node)
    if around and not any(meant.owns(record) for record in around):
        names = format_device_list(around[0].devices, node.devices())
        raise CommandRefusedError(
            f"{names} of the claim of pid {around[0].pid}, which this command is in",
            f"end that program, or: gpulock release {names.partition(' ')[2].replace(',', '')}",
        )


def tell_stale_variables(node: Node, known: Sequence[Device], export: bool) -> None:
    """Say what the calling shell is to run, where its claim has not what its mask names.

    With `export` it is printed for the shell to do so. The claim of that very shell has the rest.
    """
    token, held = os.environ.get(CLAIM), node.store.read_all_locks().values()
    own = [lock.owner for lock in held if lock.owner and lock.owner.token == token]
    uuids = {one.uuid_of(name) for one in own for name in one.devices}
    shown = {*os.environ.get("GPULOCK_DEVICES", "").split(",")} - {""}
    if not token or (uuids and shown <= uuids):
        return
    if own and own[0].pid == find_calling_shell(node.proc):
        share = " --share" if own[0].places else ""
        lines = [name_config(f'eval "$(gpulock claim -n {len(own)}{share} --export)"')]
        if export:
            rest = Grant(granted_devices([*known], {*own[0].devices}, own[0].places), own[0])
            lines = format_export_lines(node, rest, environment.driver_binds(node.settings))
    else:
        names = {CLAIM, *environment.grant_variable_names()} & os.environ.keys()
        names |= stale_mps_names(os.environ.items(), node.settings.mps_dir)
        lines = [f"unset {' '.join(sorted(names))}"]
    opening = "" if export else "gpulock: this shell still uses what is freed: "
    click.echo(opening + "\n".join(lines), err=not export)


def warn_of_started_processes(node: Node, freed: Iterable[Lock]) -> None:
    """Name what was started in the claims, and runs on without what was freed of them."""
    scan = ProcessScan(node.proc)
    users = {lock.owner.uid for lock in freed if lock.owner and lock.owner.scheduler == "process"}
    tokens = {lock.owner.token.encode() for lock in freed if lock.owner}
    scan.restrict(dict.fromkeys(users, ""))
    started = {pid: one.token for uid in users for pid, one in scan.started_as(uid)[0].items()}
    above = scan.ancestry(os.getpid())
    left = [pid for pid, token in started.items() if token in tokens and pid not in above]
    if left:
        who = f"process {left[0]} ({printable_process_name(node.proc, left[0])})"
        words = "was started in this claim, and runs on without what is freed"
        more = f"; {len(left) - 1} more likewise" if left[1:] else ""
        click.echo(f"gpulock: {who} {words}{more}", err=True)


def make_lock_filter(ids: Sequence[str], meant: Subject) -> Callable[[Lock], bool]:
    """Return what tells the locks that are meant."""
    if ids:
        return lambda lock: any(lock_ids_overlap(lock.id, name) for name in ids)
    return lambda lock: lock.owner is not None and meant.owns(lock.owner)


def release_own_locks(node: Node, ours: Callable[[Lock], bool]) -> list[Lock]:
    """Free the caller's locks that are `ours`, all or none; raise Refusal."""
    caller, how = (os.getuid(), os.getpid()), one_line(f"released by {describe_caller()}")
    try:
        let = release_unused(node, ours, caller, Deadline(LONGEST_WAIT), how)
    except Refusal as refusal:
        if refusal.kind not in (BUSY, INVALID_REQUEST):
            raise
        why = name_devices(refusal.why, node.devices_if_driver())
        raise CommandRefusedError(why, f"{refusal.do}; {FORCE_HINT}") from refusal
    for lock in let:
        log_release(node, lock, how)
    return let


def force_locks(
    node: Node, known: list[Device], ours: Callable[[Lock], bool], reason: str
) -> list[Lock]:
    """Free the locks that are `ours`, whatever is said of them, and log it; raise Refusal."""
    reaper = Reaper(node, make_liveness_judge(node), known, {})
    how = one_line(f"release --force by {describe_caller()}: {reason}")
    used: list[str] = []
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        reaper.read_locks()
        locks = [lock for lock in reaper.held.values() if ours(lock)]
        for lock in locks:
            left = reaper.device_user(lock)
            if lock.owner is not None or not lock.fault:
                free_locks(node, [lock], how)
            else:
                grants.remove_lock(node.store, lock.id)
            log_release(node, lock, f"{how}; still open: {left}" if left else how)
            used += [left] if left else []
    for left in used:  # a terminal that takes no text must not hold the gate
        click.echo(f"STILL IN USE: {left}", err=True)
    if not locks:
        raise CommandRefusedError("no matching claim", "see gpulock status")
    return locks


def log_release(node: Node, lock: Lock, how: str) -> None:
    """Log who released a lock, and how."""
    log_to_syslog(node.settings, one_line(f"{lock.id}{format_past_holder(lock)}: {how}"))


def format_past_holder(lock: Lock) -> str:
    """Return ` (was job 12 of alice)`, or nothing for a lock without owner."""
    return f" (was {format_lock_holder(lock.owner)})" if lock.owner else ""
