# SPDX-License-Identifier: Apache-2.0
"""`gpulock test`: have gpulockd run HEALTH_COMMAND on GPUs once they are free."""

from __future__ import annotations

import click

from gpulock.cli.admin.devices import make_admin_gate, prepare_admin_device, report_admin_change
from gpulock.cli.session import CommandRefusedError, Session
from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.node.devices import card_bus_id
from gpulock.text.words import format_device_label


@click.command()
@click.argument("devices", nargs=-1, required=True)
@click.pass_obj
def test_command(session: Session, devices: tuple[str, ...]) -> None:
    """Have gpulockd test the GPU of each DEVICE with HEALTH_COMMAND once it is free."""
    node = session.node()
    if not node.settings.health_command:
        raise CommandRefusedError("HEALTH_COMMAND is not set", "name a program in gpulock.conf")
    for device in devices:
        node, found, name = prepare_admin_device(session, device, card=True)
        card = card_bus_id(name)
        with make_admin_gate(node):
            cards = read_cards(node.settings.state_dir, node.boot_id)
            cards.of(card).tested = None
            save_cards(node.settings.state_dir, cards)
        label = format_device_label(card, found)
        outcome = f"gpulock why {card} tells the outcome"
        report_admin_change(node, f"{label} is tested once it is free; {outcome}")
