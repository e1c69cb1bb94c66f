# SPDX-License-Identifier: Apache-2.0
"""`gpulock run`: claim with our own pid, then become the command.

After exec the pid stays, so the command is the owner. The next claim or reconcile that finds it and
all that it started gone takes the devices.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
from typing import Any, NoReturn

import click

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.alloc.environs import CLAIM
from gpulock.alloc.process_owner import RUN, is_claim_process
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.same_job import granted_devices
from gpulock.cli.claims.acquire import (
    ClaimWishes,
    acquire_devices,
    claim_options,
    make_claim_request,
    make_cli_owner,
    make_grant_environment,
    open_node_for_claim,
    release_cli_claim,
)
from gpulock.cli.session import Session
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.node.kinds import ANY, is_of_kind
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.owner import Owner
from gpulock.text.words import format_device_list
from gpulock.workstation import waiter
from gpulock.workstation.peer import CREDENTIALS

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell says it (POSIX sh, exit status)

# programs that leave their work to a server, with their options as getopt(3) has them
TMUX = "2c:CDdf:hlL:NqS:T:uUvV"
TERMINALS = {"tmux": TMUX, "byobu": TMUX, "screen": "48aAc:dDe:fh:ilLmnOp:qQrRs:S:t:T:UvwxX"}


@click.command(context_settings={"allow_interspersed_args": False})
@claim_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run_command(
    ctx: click.Context,
    /,
    command: tuple[str],
    **options: Any,
) -> None:
    """Run COMMAND with its own GPUs, until it ends.

    gpulockd releases them then; without it the next claim does, or gpulock reap.

    \b
    gpulock run -n 2 -- python train.py
    gpulock run -n 1 --wait 1h -- ./job.sh
    gpulock run --model 'a100*' -n 2 -- python train.py
    gpulock run --share -- python class.py
    """
    session: Session = ctx.obj
    wishes = ClaimWishes(**options)
    if shutil.which(command[0]) is None:  # nobody waits an hour for that
        there = "/" in command[0] and os.path.exists(command[0])
        exit_as_shell(ctx, command[0], errno.EACCES if there else errno.ENOENT)
    mask = os.umask(0)
    os.umask(mask)
    node = open_node_for_claim(session)
    want = make_claim_request(node, wishes)
    waited = waiter.ENVIRONMENT in os.environ  # then we may hold what we asked for
    if not waited and (server := find_terminal_server(node.proc, command)):
        program = os.path.basename(command[0])
        click.echo(
            f"gpulock: your {program} server runs already (pid {server}): what it starts is not"
            f" told of these GPUs, which are freed when {program} ends or is detached; call"
            f" gpulock run inside {program} instead",
            err=True,
        )
    around = [] if waited else list_outer_claims(node)
    for record in around:
        if outer := find_outer_grant(node, record, want):
            names = format_device_list(outer.owner.devices, outer.devices)
            who = f"the claim of pid {record.pid}"
            given = {"--for": wishes.seconds, "--comment": wishes.note, "--prefer": wishes.prefer}
            unused = " and ".join([name for name, value in given.items() if value])
            no = f": nothing of it is changed by {unused}" if unused else ""
            click.echo(f"gpulock: {names} of {who}, which this command is in{no}", err=True)
            exec_command(command, outer, node.settings, mask)
    for record in around:
        names = format_device_list(record.devices, node.devices())
        who = f"the claim of pid {record.pid}, which this command is in"
        click.echo(f"gpulock: {who}, keeps {names}; this takes others", err=True)
    start_own_session()
    record = make_cli_owner(node, os.getpid(), RUN)
    grant = acquire_devices(session, node, record, want, wishes)
    try:
        exec_command(command, grant, node.settings, mask)
    except BaseException as fault:
        release_cli_claim(node, grant, "its command did not start")
        if isinstance(fault, OSError):
            exit_as_shell(ctx, command[0], fault.errno or 0)
        raise


def list_outer_claims(node: Node) -> list[Owner]:
    """Return the claims of our user that we are in."""
    tree, me = ProcessScan(node.proc), os.getpid()
    outer: dict[str, Owner] = {}
    for lock in node.store.read_detailed_locks().values():
        record = lock.owner
        if record is None or record.scheduler != "process" or record.uid != os.getuid():
            continue
        if not record.draining and is_claim_process(me, lock, tree):
            outer[record.token] = record
    return [*outer.values()]


def find_outer_grant(node: Node, record: Owner, want: ClaimRequest) -> Grant | None:
    """Return what is wanted of a claim that we are in, None where it has not so much."""
    kind = want.kinds[0][0] if want.kinds else ANY
    granted = granted_devices(node.devices(), {*record.devices}, record.places)
    fit = [
        one
        for one in granted
        if want.share == bool(record.places)
        and is_of_kind(one, kind)
        and (not want.wanted or one.id.partition(SHARE)[0] in want.wanted)
    ]
    if len(fit) < want.count:
        return None
    chosen = fit[: want.count]
    return Grant(chosen, record.copy(devices=tuple(one.id for one in chosen)), False)


def find_terminal_server(proc: Proc, command: tuple[str, ...]) -> int:
    """Return the server that runs already and is to start the programs, 0 for none.

    Of tmux it is who listens at its socket; screen starts one, unless it is to join another.
    """
    import getopt

    program = os.path.basename(command[0])
    try:
        options = dict(getopt.getopt(command[1:], TERMINALS.get(program, ""))[0])
    except getopt.GetoptError:
        options = {}
    if program == "screen" and {"-r", "-R", "-x", "-X"} & options.keys():
        scan, me = ProcessScan(proc), os.getuid()
        scan.restrict({me: ""})
        return next((pid for pid in scan.named(program) if scan.status(pid).uids[0] == me), 0)
    if TERMINALS.get(program) != TMUX:
        return 0
    outer = "" if "-L" in options else os.environ.get("TMUX", "").partition(",")[0]
    folder = f"{os.environ.get('TMUX_TMPDIR') or '/tmp'}/tmux-{os.getuid()}"
    path = options.get("-S") or outer or f"{folder}/{options.get('-L', 'default')}"
    with socket.socket(socket.AF_UNIX) as server:
        server.setblocking(False)
        try:
            server.connect(path)
        except OSError:
            return 0
        data = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(data)[0])


def exit_as_shell(ctx: click.Context, name: str, number: int) -> NoReturn:
    """Say why the command cannot be started, an errno, and end as a shell would."""
    click.echo(f"gpulock: run: {name}: {os.strerror(number)}", err=True)
    ctx.exit(NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE)


def start_own_session() -> None:
    """Lead a session of our own where no terminal is: the claim then covers all we start.

    With a terminal Ctrl-C must reach the command, so its session stays.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        if os.getpgrp() != os.getpid():
            os.setsid()


def exec_command(
    command: tuple[str, ...], grant: Grant, settings: Settings, umask: int
) -> NoReturn:
    """Replace this process by the command; raise OSError or Refusal.

    Its environment is ours, with nothing left of what that said about GPUs. The claim's token
    comes first: of an environment no more than its beginning is read.
    """
    binds = environment.driver_binds(settings)
    stale, values = make_grant_environment(grant, settings, os.environ, binds)
    kept = {name: value for name, value in os.environ.items() if name not in {CLAIM, *stale}}
    os.umask(umask)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, a command expects them
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], command, {CLAIM: grant.owner.token, **kept, **values})
