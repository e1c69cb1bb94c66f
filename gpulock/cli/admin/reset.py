# SPDX-License-Identifier: Apache-2.0
"""`gpulock reset`: reset one GPU by nvidia-smi, where nobody has it or what it is linked to."""

from __future__ import annotations

import click

from gpulock.cli.admin.devices import (
    make_admin_gate,
    prepare_admin_device,
    reap_device_lock,
    report_admin_change,
)
from gpulock.cli.session import CommandRefusedError, Session, describe_caller
from gpulock.daemon.health.reset import (
    are_links_known,
    reserve_for_reset,
    reset_reserved,
)
from gpulock.daemon.idle.command import check_program_trust
from gpulock.node.devices import card_bus_id
from gpulock.text.words import format_count, format_device_label


@click.command()
@click.argument("device")
@click.pass_obj
def reset_command(session: Session, device: str) -> None:
    """Reset the GPU of DEVICE; refused while somebody has it or a link peer of it."""
    node, found, name = prepare_admin_device(session, device, card=True)
    card, by = card_bus_id(name), describe_caller()
    label = format_device_label(card, found)
    with make_admin_gate(node):
        reap_device_lock(node, found, card)  # what a dead job left holds up nothing
    cards = reserve_for_reset(node, card, by)
    if cards[1:]:
        kind = "link peer" if are_links_known(node, card) else "other GPU"
        peers = format_count(len(cards) - 1, kind)
        click.echo(f"{label} is being reset; {peers} reserved meanwhile: {' '.join(cards[1:])}")
    if failed := reset_reserved(node, cards, by):
        do = "see dmesg for NVRM and Xid; reboot the node where it cannot be reset"
        if check_program_trust(node.settings.nvidia_smi):
            do = f"let root alone write {node.settings.nvidia_smi} and the way to it"
        raise CommandRefusedError(f"{label} was not reset: {failed}", do)
    report_admin_change(node, f"{label} was reset")
