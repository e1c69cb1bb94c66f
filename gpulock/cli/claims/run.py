# SPDX-License-Identifier: Apache-2.0
"""`gpulock run`: claim with our own pid, then become the command.

After exec the pid stays, so the command is the owner, and its end frees the devices: the next
claim or reconcile that finds the pid gone takes them.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from typing import NoReturn

import click

from gpulock.alloc.grant import Grant
from gpulock.alloc.release import release
from gpulock.cli.claims.acquire import (
    CLAIM_SECONDS,
    claim_options,
    node_to_hold,
    obtain,
    owner_of,
    prepare,
    which,
)
from gpulock.cli.session import Session
from gpulock.deadline import Deadline
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.workstation import client, process_claims

RUN = "run"  # the comment of a claim whose process is the command itself
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell says it (POSIX sh, exit status)


@click.command(context_settings={"allow_interspersed_args": False})
@claim_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, count: int | None, devices: str | None, wait: float, command: tuple[str]
) -> None:
    """Run COMMAND with GPUs of its own, freed when it ends.

    \b
    gpulock run -n 2 -- python train.py
    gpulock run -n 1 --wait 1h -- ./job.sh
    """
    session: Session = ctx.obj
    refuse_missing(ctx, command[0])
    mask = os.umask(0)
    os.umask(mask)
    node = node_to_hold(session)
    number, wanted = which(node, count, devices)
    prepare(node)
    lead_session()
    grant = obtain(node, owner_of(node, os.getpid(), RUN), number, wanted, wait)
    try:
        environ = environment_of(grant, node.settings, dict(os.environ))
        os.umask(mask)
        become(command, environ)
    except BaseException as fault:
        give_back(node, grant)
        if isinstance(fault, OSError):
            fail(ctx, command[0], fault)
        raise


def refuse_missing(ctx: click.Context, name: str) -> None:
    """End with the shell's code where there is no such command: nobody waits an hour for that."""
    if shutil.which(name) is None:
        there = os.path.exists(name) and "/" in name
        number = errno.EACCES if there else errno.ENOENT
        fail(ctx, name, OSError(number, os.strerror(number)))


def fail(ctx: click.Context, name: str, fault: OSError) -> NoReturn:
    """Say why the command cannot be started, and end as a shell would."""
    click.echo(f"gpulock: run: {name}: {fault.strerror}", err=True)
    ctx.exit(NOT_FOUND if fault.errno == errno.ENOENT else NOT_EXECUTABLE)


def lead_session() -> None:
    """Lead a session of our own where no terminal is: the claim then covers all we start.

    With a terminal Ctrl-C must reach the command, so its session stays.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        if os.getpgrp() != os.getpid():
            os.setsid()


def environment_of(grant: Grant, settings: Settings, environ: dict[str, str]) -> dict[str, str]:
    """Return the command's environment: ours, with nothing left of what it said about GPUs."""
    for name in environment.drop_names():
        environ.pop(name, None)
    environ.update(environment.variables(grant.devices, settings))
    binds = environment.driver_binds(settings)
    if binds:
        for name, old in environment.own_binds(environ):
            environ[name] = environment.appended(old, binds)
    return environ


def become(command: tuple[str, ...], environ: dict[str, str]) -> NoReturn:
    """Replace this process by the command; raise OSError."""
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, a command expects them
        signal.signal(name, signal.SIG_DFL)
    os.execvpe(command[0], command, environ)


def give_back(node: Node, grant: Grant) -> None:
    """Release a claim whose command did not start."""
    if client.is_needed(node):
        client.release(node, os.getpid())
        return
    token = grant.owner.token
    judge = process_claims.judge(node)
    deadline = Deadline(CLAIM_SECONDS)
    release(node, lambda o: o.token == token, judge, deadline, "its command did not start")
