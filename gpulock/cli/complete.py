# SPDX-License-Identifier: Apache-2.0
"""What a shell offers for an argument: devices, and jobs that hold some.

Cold. The shell runs the command line again for each key, so a node that cannot be read offers
nothing and says nothing.
"""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from gpulock.cli.session import Session
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings_file import DEFAULT_PATH


def complete_device(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the devices of the node by number; by bus id or UUID where that is begun."""
    found: list[CompletionItem] = []
    try:
        for device in completed_node(ctx).devices():
            names = (device.label(), device.id, device.uuid)
            name = next((name for name in names if name.startswith(incomplete)), "")
            if name:
                found.append(CompletionItem(name, help=device.model))
    except (OSError, Refusal):
        return []
    return found


def complete_job(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the jobs that hold devices of the node, with their users."""
    found: dict[str, str] = {}
    try:
        for lock in completed_node(ctx).store.read_all_locks().values():
            if lock.owner is not None and lock.owner.scheduler not in {"process", "admin"}:
                found[lock.owner.job()] = lock.owner.user
    except (OSError, Refusal):
        return []
    return [CompletionItem(k, help=v) for k, v in sorted(found.items()) if k.startswith(incomplete)]


def complete_subject(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the devices, then the jobs."""
    return [*complete_device(ctx, param, incomplete), *complete_job(ctx, param, incomplete)]


def completed_node(ctx: click.Context) -> Node:
    """Return the node of the command line that is being completed; raise Refusal."""
    return Session(str(ctx.find_root().params.get("config") or DEFAULT_PATH)).node()
