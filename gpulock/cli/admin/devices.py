# SPDX-License-Identifier: Apache-2.0
"""What an administrator does to devices: reserve, quarantine, and back.

A reserve is a lock with a note that puts it back after a reboot. A quarantine is a note alone: a
job that holds the device keeps it, and nobody gets it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import click

from gpulock.alloc import reaper
from gpulock.alloc.grant import retire
from gpulock.alloc.release import present
from gpulock.cli.claims.release import device_id, short_enough
from gpulock.cli.select import SelectError, match
from gpulock.cli.session import Refused, Session, caller, log
from gpulock.deadline import Deadline
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.node.devices import Device, overlaps
from gpulock.store import boot
from gpulock.store import quarantine as notes
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.text.words import holder, label_of
from gpulock.workstation.process_claims import judge, prepare

F = TypeVar("F", bound=Callable[..., object])


def reason_given(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the reason; raise BadParameter for an empty one, or one that is too long."""
    if not value.strip():
        raise click.BadParameter("say why.", ctx, param)
    short_enough(ctx, param, value)
    return value


def because_option(function: F) -> F:
    """Add --because, which is needed."""
    text = "Why; shown to everybody who asks."
    return click.option(
        "--because", metavar="TEXT", required=True, help=text, callback=reason_given
    )(function)


@click.command()
@click.argument("device")
@because_option
@click.pass_obj
def reserve(session: Session, device: str, because: str) -> None:
    """Lock DEVICE until `unreserve`, over reboots; refused while somebody holds it."""
    node, found, name = at(session, device)
    label, reason = label_of(name, found), one_line(because)
    with gate(node):
        lock = settled(node, found, name)
        if lock is not None:
            who = holder(lock.owner) if lock.owner else "a lock without a readable owner"
            raise Refused(f"{label} is held by {who}", f"gpulock why {device}")
        note = {"by": caller(), "because": reason, "at": f"{time.time():.0f}"}
        record = boot.reserve_owner(name, note, node.boot_id, node.name)
        node.store.make(name, record)
        try:
            notes.put(node.settings.state_dir, notes.RESERVES, name, note["by"], reason)
        except BaseException:
            node.store.undo(name)
            raise
    done(node, f"{label} is reserved: {reason}")


@click.command()
@click.argument("device")
@click.pass_obj
def unreserve(session: Session, device: str) -> None:
    """End the reserve of DEVICE."""
    node, found, name = at(session, device)
    label = label_of(name, found)
    with gate(node):
        lock = node.store.all().get(name)
        record = lock.owner if lock else None
        reserved = record is not None and record.scheduler == "admin"
        noted = name in notes.listed(node.settings.state_dir, notes.RESERVES)
        if not reserved and not noted:
            raise Refused(f"{label} is not reserved", "see gpulock status")
        if noted:
            notes.lift(node.settings.state_dir, notes.RESERVES, name)
        if lock is not None and reserved:
            retire(node, lock, one_line(f"unreserved by {caller()}"))
    done(node, f"{label} is not reserved any more")


@click.command()
@click.argument("device")
@because_option
@click.pass_obj
def quarantine(session: Session, device: str, because: str) -> None:
    """Take DEVICE out of service until `restore`, over reboots."""
    node, found, name = at(session, device, card=True)
    reason = one_line(because)
    with gate(node):
        notes.put(node.settings.state_dir, notes.QUARANTINE, name, caller(), reason)
        held = [lock for lock in node.store.all().values() if overlaps(lock.id, name)]
    done(node, f"{label_of(name, found)} is quarantined: {reason}")
    for lock in held:
        if lock.owner:
            click.echo(f"{holder(lock.owner)} holds {lock.id} and keeps it until it ends")


@click.command()
@click.argument("device")
@click.pass_obj
def restore(session: Session, device: str) -> None:
    """Put DEVICE back into service."""
    node, found, name = at(session, device, card=True)
    label = label_of(name, found)
    with gate(node):
        listed = notes.listed(node.settings.state_dir, notes.QUARANTINE)
        card = name.partition(".gi")[0]
        if name not in listed and card in listed:
            raise Refused(f"{label} is quarantined with its card", f"gpulock restore {card}")
        if name not in listed:
            lock = node.store.all().get(name)
            if lock is not None:
                node.store.read_details(lock)
            if lock is not None and lock.orphans:
                raise Refused(
                    f"{label} is quarantined because {lock.orphans}",
                    "end that process, then gpulock reap",
                )
            raise Refused(f"{label} is not quarantined", "see gpulock status")
        notes.lift(node.settings.state_dir, notes.QUARANTINE, name)
    done(node, f"{label} is back in service")


def at(session: Session, device: str, card: bool = False) -> tuple[Node, list[Device], str]:
    """Return the node made ready, its devices, and the id of the one that is meant.

    With `card` a name that all instances of one card share means that card, and so all of them.
    """
    node = session.own_node()
    found = present(node)
    try:
        name = device_id(device, found)
    except SelectError as fault:
        cards = {one.bus for one in match(device, found)}
        if not card or len(cards) != 1:
            raise Refused(str(fault), "see gpulock status") from fault
        name = cards.pop()
    prepare(node)
    return node, found, name


def gate(node: Node) -> Gate:
    """Return the gate, to hold for the length of a change."""
    return Gate(node.store.path, Deadline(node.settings.gate_timeout))


def settled(node: Node, found: list[Device], name: str) -> Lock | None:
    """Return the lock on a device once what dead owners left is freed; gate held."""
    held = {key: lock for key, lock in node.store.all().items() if overlaps(key, name)}
    if held:
        judge_now = judge(node)
        reaper.settle(node, held, judge_now, reaper.make_holders(node, found, judge_now))
        held = {key: lock for key, lock in node.store.all().items() if overlaps(key, name)}
    return next(iter(held.values()), None)


def done(node: Node, line: str) -> None:
    """Say what was done, and log who did it."""
    click.echo(line)
    log(node.settings, one_line(f"{line} (by {caller()})"))
