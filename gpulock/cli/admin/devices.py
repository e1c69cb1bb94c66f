# SPDX-License-Identifier: Apache-2.0
"""What an administrator does to devices: reserve, quarantine, and back; test.

A reserve is a lock with a note that puts it back after a reboot. A quarantine is a note alone: a
job that holds the device keeps it, and nobody gets it afterwards.
"""

from __future__ import annotations

import os
import time
from typing import Any

import click

from gpulock.alloc import reaper
from gpulock.alloc.node_view import check_no_mps_ends, read_node_view
from gpulock.alloc.reaper import free_locks
from gpulock.cli.claims import socket_client
from gpulock.cli.claims.release import check_reason
from gpulock.cli.select import SelectError, match_devices, resolve_device_id
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    describe_caller,
    log_to_syslog,
    name_config,
    parse_time,
    uid_to_user_name,
)
from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.node.devices import Device, card_bus_id, lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import boot, grants
from gpulock.store import quarantine as notes
from gpulock.store.gate import LONGEST_WAIT, Gate
from gpulock.store.locks import Lock
from gpulock.store.repair import repair_locks
from gpulock.store.reservations import Reservation
from gpulock.text.words import MINUTE, format_count, format_device_label, format_lock_holder
from gpulock.workstation.process_claims import ensure_node_dirs
from gpulock.workstation.wire import LONGEST_NOTE, RESERVE, UNRESERVE, SocketRequest

reason_option = click.option(
    "--reason",
    metavar="TEXT",
    required=True,
    help="Reason, which `gpulock status` and `why` show.",
    callback=check_reason,
)


def parse_time_option(ctx: click.Context, param: click.Parameter, value: str | None) -> float:
    """Return a point in time that is to come (epoch seconds), 0 for none; one of --to is later."""
    now = time.time()
    try:
        at = 0.0 if value is None else parse_time(value, now, ctx.params.get("begin") or now)
        return at // MINUTE * MINUTE  # as it is shown
    except ValueError as fault:
        raise click.BadParameter(str(fault), ctx, param) from None


@click.command()
@click.argument("device")
@click.option(
    "--from",
    "begin",
    callback=parse_time_option,
    is_eager=True,  # --to goes by it
    metavar="TIME",
    help="From then: 14:00, 2h (from now) or 2026-12-01T14:00.",
)
@click.option("--to", "end", callback=parse_time_option, metavar="TIME", help="Until then.")
@reason_option
@click.pass_obj
def reserve_command(session: Session, device: str, reason: str, begin: float, end: float) -> None:
    """Lock DEVICE until `unreserve`, also over reboots.

    Refused while a job holds it. With --to it is for your own claims alone, on a workstation that
    lets its users do so (RESERVE_MAX), and who holds it keeps it.
    """
    if end:
        begin = begin or time.time() // MINUTE * MINUTE
        if end <= begin:
            raise click.UsageError("--to is before --from.")
        terms = {"note": reason[:LONGEST_NOTE], "begin": begin, "seconds": end - begin}
        user = uid_to_user_name(os.getuid())
        said = Reservation(device, os.getuid(), (begin, end), user, reason).describe()
        ask_for_reserve(session, device, RESERVE, f"is {said}", **terms)
        return
    if begin:
        raise click.UsageError("say until when with --to TIME.")
    if socket_client.is_daemon_needed(session.node()):
        raise CommandRefusedError("only root reserves without an end", "add --to TIME")
    node, known, name = prepare_admin_device(session, device)
    label = format_device_label(name, known)
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        lock = reap_device_lock(node, known, name)
        if lock is not None:
            who = format_lock_holder(lock.owner) if lock.owner else "a lock that cannot be read"
            raise CommandRefusedError(f"{label} is held by {who}", f"gpulock why {device}")
        check_no_mps_ends(node, [card_bus_id(name)])
        note = {"by": describe_caller(), "reason": reason, "at": f"{time.time():.0f}"}
        record = boot.reserve_owner(name, note, node.boot_id, node.name)
        grants.make_claim(node.store, record)
        try:
            notes.write_device_note(
                node.settings.state_dir, notes.RESERVE, name, note["by"], reason
            )
        except BaseException:
            grants.undo_claim(node.store, record.token, record.devices)
            raise
    report_admin_change(node, f"{label} is reserved: {reason}")
    report_quarantine(node, label, name)


@click.command()
@click.argument("device")
@click.pass_obj
def unreserve_command(session: Session, device: str) -> None:
    """End the reserve of DEVICE, or all that you have reserved of it."""
    node = session.node()
    if socket_client.is_daemon_needed(node):
        ask_for_reserve(session, device, UNRESERVE)
        return
    node, known, name = prepare_admin_device(session, device)
    label = format_device_label(name, known)
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        lock = node.store.read_all_locks().get(name)
        record = lock.owner if lock else None
        reserved = record is not None and record.scheduler == "admin"
        noted = name in notes.list_noted_devices(node.settings.state_dir, notes.RESERVE)
        if not (reserved or noted or node.settings.user_claims):
            raise CommandRefusedError(f"{label} is not reserved", "see gpulock status")
        if noted:
            notes.remove_device_note(node.settings.state_dir, notes.RESERVE, name)
        if lock is not None and reserved:
            free_locks(node, [lock], one_line(f"unreserved by {describe_caller()}"))
    if not reserved and not noted:  # a user's own, of which gpulockd keeps the file
        ask_for_reserve(session, device, UNRESERVE)
        return
    report_admin_change(node, f"the administrator's reserve of {label} is over")


@click.command()
@click.argument("device")
@reason_option
@click.pass_obj
def quarantine_command(session: Session, device: str, reason: str) -> None:
    """Take DEVICE out of service until `restore`, also over reboots."""
    node, known, name = prepare_admin_device(session, device, card=True)
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        notes.write_device_note(
            node.settings.state_dir, notes.QUARANTINE, name, describe_caller(), reason
        )
        held = find_overlapping_locks(node.store.read_all_locks(), name)
    report_admin_change(node, f"{format_device_label(name, known)} is quarantined: {reason}")
    report_holders(held, known)


@click.command()
@click.argument("device")
@click.pass_obj
def restore_command(session: Session, device: str) -> None:
    """Put DEVICE back into service."""
    node, known, name = prepare_admin_device(session, device, card=True)
    label = format_device_label(name, known)
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        listed = notes.list_noted_devices(node.settings.state_dir, notes.QUARANTINE)
        card = name.partition(".gi")[0]
        if name not in listed and card in listed:
            raise CommandRefusedError(
                f"{label} is quarantined with its card", f"gpulock restore {card}"
            )
        if name not in listed:
            view = read_node_view(node, clock_boottime())
            if orphans := view.find_orphans(view.held.get(name)):
                why = f"{label} is quarantined because {orphans}"
                raise CommandRefusedError(why, "end that process, then gpulock reap")
            raise CommandRefusedError(f"{label} is not quarantined", "see gpulock status")
        notes.remove_device_note(node.settings.state_dir, notes.QUARANTINE, name)
    report_admin_change(node, f"{label} is not quarantined any more")


@click.command()
@click.argument("devices", nargs=-1, required=True)
@click.pass_obj
def test_command(session: Session, devices: tuple[str, ...]) -> None:
    """Have gpulockd test the GPU of each DEVICE with HEALTH_COMMAND once it is free."""
    node = session.node()
    if not node.settings.health_command:
        raise CommandRefusedError("HEALTH_COMMAND is not set", "name a program in gpulock.conf")
    missing: list[str] = []
    for device in devices:
        try:
            node, known, name = prepare_admin_device(session, device, card=True)
        except SelectError as fault:
            missing.append(fault.why)
            continue
        card = card_bus_id(name)
        with Gate(node.store, Deadline(LONGEST_WAIT)):
            cards = read_cards(node.settings.state_dir, node.boot_id)
            cards.of(card).tested = None
            save_cards(node.settings.state_dir, cards)
        label = format_device_label(card, known)
        outcome = f"gpulock why {card} tells the outcome"
        report_admin_change(node, f"{label} is tested once it is free; {outcome}")
    if missing:
        raise SelectError("; ".join(missing))


def prepare_admin_device(
    session: Session, device: str, card: bool = False
) -> tuple[Node, list[Device], str]:
    """Return the node made ready, its devices, and the id of the one that is meant.

    With `card` a name that all instances of one card share means that card, and so all of them.
    """
    node = session.writable_node()
    known, name = find_admin_device(node, device, card)
    ensure_node_dirs(node)
    return node, known, name


def find_admin_device(node: Node, device: str, card: bool = False) -> tuple[list[Device], str]:
    """Return the node's devices, and the id of the one that is meant; raise Refusal."""
    known = node.devices_if_driver()
    try:
        return known, resolve_device_id(device, known)
    except SelectError:
        cards = {one.bus for one in match_devices(device, known)}
        if not card or len(cards) != 1:
            raise
        return known, cards.pop()


def ask_for_reserve(session: Session, device: str, act: str, said: str = "", **fields: Any) -> None:
    """Have gpulockd reserve a device for the caller, or end that; raise Refusal."""
    node = session.node()
    known, name = find_admin_device(node, device)
    request, label = SocketRequest(act, devices=(name,), **fields), format_device_label(name, known)
    reply = socket_client.request_daemon_act(node, request)
    if act == UNRESERVE:
        click.echo(f"{label}: {format_count(reply.number, 'reservation')} ended: {reply.why}")
        return
    click.echo(f"{label} {said}")
    report_quarantine(node, label, name)
    report_holders(find_overlapping_locks(node.store.read_all_locks(), name), known)


def report_quarantine(node: Node, label: str, name: str) -> None:
    """Say that nobody is granted a device that was reserved, where it is out of service."""
    noted = notes.read_device_notes(node.settings.state_dir, notes.QUARANTINE)
    for one, note in noted.items():
        if lock_ids_overlap(one, name):
            click.echo(f"{label} is quarantined: {notes.note_reason(note)}")


def report_holders(held: dict[str, Lock], known: list[Device]) -> None:
    """Say who has the locks, and keeps them."""
    for lock in held.values():
        if lock.owner:
            who = format_lock_holder(lock.owner)
            label = format_device_label(lock.id, known)
            click.echo(f"{who} holds {label} and keeps it until it is freed")


def reap_device_lock(node: Node, known: list[Device], name: str) -> Lock | None:
    """Return the lock on a device once what dead owners left is freed; gate held."""
    held = find_overlapping_locks(repair_locks(node.store, node.boot_id), name)
    if held:
        reaper.Reaper(node, make_liveness_judge(node), known, held).finish([*held.values()])
        held = find_overlapping_locks(node.store.read_all_locks(), name)
    return next(iter(held.values()), None)


def find_overlapping_locks(every: dict[str, Lock], name: str) -> dict[str, Lock]:
    """Return the locks on a device, on its card or on a part of it."""
    return {key: lock for key, lock in every.items() if lock_ids_overlap(key, name)}


def report_admin_change(node: Node, line: str) -> None:
    """Say what was done, and log who did it."""
    click.echo(name_config(line))
    log_to_syslog(node.settings, one_line(f"{line} (by {describe_caller()})"))
