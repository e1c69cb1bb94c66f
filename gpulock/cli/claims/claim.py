# SPDX-License-Identifier: Apache-2.0
"""`gpulock claim`: hold devices for a process that runs already, such as an interactive shell."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

import click

from gpulock.alloc.environs import CLAIM
from gpulock.alloc.process_owner import NAMED
from gpulock.cli.claims.acquire import (
    ClaimWishes,
    acquire_devices,
    claim_options,
    format_export_lines,
    make_claim_request,
    make_cli_owner,
    open_node_for_claim,
)
from gpulock.cli.session import CommandRefusedError, Session, find_calling_shell, name_config
from gpulock.job import environment
from gpulock.node.procfs import Proc
from gpulock.store.owner import Owner
from gpulock.text.words import format_device_list, short_model
from gpulock.workstation.process_claims import claim_end

SCRIPT = 2  # the word after `sh -c`
ONE_SCRIPT = re.compile(r"-[a-z]*c")
REDIRECTED = re.compile(r"[<>]&[0-9-]")  # the & of 2>&1 begins no command
SEPARATORS = frozenset(";&|\n")


@click.command()
@claim_options
@click.option("--pid", type=click.IntRange(min=2), help="Process to hold them.  [default: caller]")
@click.option("--export", is_flag=True, help="Print export lines for eval.")
@click.pass_obj
def claim_command(
    session: Session,
    /,
    pid: int | None,
    export: bool,
    **options: Any,
) -> None:
    """Hold GPUs for a process until it ends or they are released.

    \b
    eval "$(gpulock claim -n 1 --export)"
    """
    node, wishes = open_node_for_claim(session), ClaimWishes(**options)
    want = make_claim_request(node, wishes)
    holder = pid or find_calling_shell(node.proc)
    if pid is None:
        refuse_passing_shell(node.proc, holder)
    record = make_cli_owner(node, holder, NAMED if pid else "")
    if os.geteuid() not in (0, record.uid):
        raise CommandRefusedError(
            f"process {record.pid} is {record.user}'s", "claim for one of your own"
        )
    binds = environment.driver_binds(node.settings) if export else ""
    grant = acquire_devices(session, node, record, want, wishes)
    token = {CLAIM: grant.owner.token}  # what is started with it holds the claim
    if export:  # a shell evaluates them
        lines = format_export_lines(node, grant, binds)
    else:
        of = "a share of " if grant.owner.places else ""
        lines = [
            f"{of}GPU {d.label()}  {d.bus}  {short_model(d.model)}  {d.uuid}".rstrip()
            for d in grant.devices
        ]
    click.echo("\n".join(lines))
    names = format_device_list([d.id for d in grant.devices], grant.devices)
    held = node.store.read(grant.owner.devices[0]).owner
    end = f"; the claim's end: {claim_end(held)}" if held and held.until else ""
    hint = f"gpulock: {names} held by pid {record.pid} until its claim's last process ends{end}"
    hint = f"{hint}; give back: gpulock release"
    click.echo(name_config(hint if pid is None else f"{hint} --pid {pid}"), err=True)
    mask = dict(environment.grant_variables(grant.devices, node.settings))
    cuda = token | {name: value for name, value in mask.items() if name.startswith("CUDA_")}
    if pid is not None or not read_command(node.proc, holder)[0].endswith("sh"):
        line = f"import os; os.environ.update({cuda})"
        warning = (
            "it sees all GPUs, and what it starts keeps none, until you let it run, before CUDA"
        )
        click.echo(f"gpulock: {warning}: {line}", err=True)
    elif not export and not cuda.items() <= os.environ.items():
        line = f'eval "$(gpulock claim {format_claim_options(grant.owner, wishes)} --export)"'
        warning = f"gpulock: this shell sees all GPUs until you run: {line}"
        click.echo(name_config(warning), err=True)


def format_claim_options(record: Owner, wishes: ClaimWishes) -> str:
    """Return the options that ask for what a claim has."""
    kinds = {"devices": wishes.devices, "model": wishes.model, "mig": wishes.mig}
    named = [f" --{name} {shlex.quote(value)}" for name, value in kinds.items() if value]
    share = " --share" if record.places else ""
    return f"-n {len(record.devices)}{share}{''.join(named)}"


def refuse_passing_shell(proc: Proc, pid: int) -> None:
    """Refuse a caller that is a shell which runs this command alone, and ends with it.

    So it is for `!gpulock claim` in a notebook, and for a subprocess with a shell.
    """
    words = read_command(proc, pid)
    if len(words) <= SCRIPT or not words[0].endswith("sh") or not ONE_SCRIPT.fullmatch(words[1]):
        return
    if set(REDIRECTED.sub("", words[SCRIPT].strip())) & SEPARATORS:
        return
    raise CommandRefusedError(
        f"the calling shell (pid {pid}) ends with this command, and its GPUs would be free again",
        f"name who is to hold them, as in gpulock claim -n 1 --pid {proc.stat(pid).ppid}",
    )


def read_command(proc: Proc, pid: int) -> list[str]:
    """Return the words of a process's command, an empty one where they cannot be seen."""
    try:
        return [os.fsdecode(word) for word in proc.read_memory(pid, "cmdline").split(b"\0")]
    except OSError:
        return [""]
