# SPDX-License-Identifier: Apache-2.0
"""`gpulock cdi`: the node's devices for podman and Docker."""

from __future__ import annotations

import click

from gpulock.cli.session import Session
from gpulock.daemon.reconcile.cdi import keep, path_of, spec, text_of


@click.command()
@click.option("--write", is_flag=True, help="Write it into CDI_DIR; gpulockd does so by itself.")
@click.pass_obj
def cdi(session: Session, write: bool) -> None:
    """Print the CDI spec of this node, by which podman and Docker know its devices.

    In a job, where CDI_DIR is set: podman run $GPULOCK_CDI IMAGE
    """
    node = session.node()
    text = text_of(spec(node.settings, node.devices()))
    if not write:
        click.echo(text, nl=False)
        return
    written = keep(node.settings, text)
    click.echo(f"{path_of(node.settings)}: {'written' if written else 'up to date'}")
