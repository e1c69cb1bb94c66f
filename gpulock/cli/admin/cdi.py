# SPDX-License-Identifier: Apache-2.0
"""`gpulock cdi`: the node's devices for podman and Docker."""

from __future__ import annotations

import click

from gpulock.cli.session import Session
from gpulock.daemon.reconcile.cdi import (
    build_cdi_spec,
    cdi_spec_path,
    format_cdi_spec,
    update_cdi_spec,
)


@click.command()
@click.option("--write", is_flag=True, help="Write it into CDI_DIR, as gpulockd does.")
@click.pass_obj
def cdi_command(session: Session, write: bool) -> None:
    """Print the CDI spec of this node, which names its devices for podman and Docker.

    In a job, where CDI_DIR is set: podman run $GPULOCK_CDI IMAGE
    """
    node = session.node()
    text = format_cdi_spec(build_cdi_spec(node.settings, node.devices()))
    if not write:
        click.echo(text, nl=False)
        return
    written = update_cdi_spec(node.settings, text)
    click.echo(f"{cdi_spec_path(node.settings)}: {'written' if written else 'up to date'}")
