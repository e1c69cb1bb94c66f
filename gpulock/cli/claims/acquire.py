# SPDX-License-Identifier: Apache-2.0
"""What `run` and `claim` share: their options, and the claim itself."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import click

from gpulock.alloc import environs
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.alloc.release import release_locks
from gpulock.cli.claims import socket_client
from gpulock.cli.select import match_device_list
from gpulock.cli.session import FOR_EVER, Session, parse_duration_option, uid_to_user_name
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, Refusal, one_line
from gpulock.job import environment
from gpulock.job.mps import stale_mps_names, wait_for_mps
from gpulock.node.context import Node
from gpulock.node.kinds import MIG, MODEL, parse_kind
from gpulock.node.settings import Settings
from gpulock.report.scan import ClaimQuery, HistoryFaults
from gpulock.report.sources import find_last_claim
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.owner import Owner
from gpulock.text.words import format_count
from gpulock.workstation import process_claims
from gpulock.workstation.wire import CLAIM, LONGEST_NOTE, SocketRequest

F = TypeVar("F", bound=Callable[..., object])
PAUSE = 1.0  # seconds between two attempts without gpulockd
CLAIM_SECONDS = 60.0  # for one attempt, whose wait at the gate is LONGEST_WAIT


class ClaimWishes(NamedTuple):
    """What the options of `claim_options` say."""

    number: int | None
    devices: str | None
    share: bool
    model: str | None
    mig: str | None
    wait: float
    seconds: float
    note: str
    prefer: str | None


def claim_options(function: F) -> F:
    """Add the options of ClaimWishes, which the command takes as `wishes`."""
    for option in (
        click.option(
            "--wait",
            callback=parse_duration_option,
            is_flag=False,
            flag_value=FOR_EVER,
            metavar="[DURATION]",
            help="Wait in the queue: 90s, 30m, 1h; without a duration for ever.",
        ),
        click.option(
            "--for",
            "seconds",
            callback=parse_duration_option,
            metavar="DURATION",
            help="End the claim after 90m, 2h; what still runs keeps its GPUs.",
        ),
        click.option(
            "--comment",
            "note",
            default="",
            metavar="TEXT",
            help="Shown in `gpulock status` beside the GPUs.",
        ),
        click.option(
            "--prefer", type=click.Choice(["last"]), help="Those of your last claim, where free."
        ),
        click.option("--devices", metavar="LIST", help="Exactly these: 0,1, bus ids or UUIDs."),
        click.option("--model", metavar="NAME", help="Cards of this model: h200, 'a100*'."),
        click.option("--mig", metavar="PROFILE", help="MIG instances of this profile: 3g.40gb."),
        click.option("--share", is_flag=True, help="Places on a GPU that others share (SHARES)."),
        click.option(
            "-n", "number", type=click.IntRange(min=1), metavar="N", help="How many GPUs."
        ),
    ):
        function = option(function)
    return function


def open_node_for_claim(session: Session) -> Node:
    """Return the node, on which we or gpulockd for us may claim; raise Refusal."""
    node = session.node()
    return node if socket_client.is_daemon_needed(node) else session.writable_node()


def make_claim_request(node: Node, wishes: ClaimWishes) -> ClaimRequest:
    """Return what is asked for.

    Raises UsageError or Refusal. Of a kind one is asked for without -n.

    Only one option names a kind or devices, but shares may be of certain cards.
    """
    count, devices, share, model, mig = wishes[:5]
    if (model is not None) + (mig is not None) + bool(share or devices is not None) > 1:
        raise click.UsageError(
            "use one of --model, --mig, --share and --devices; --share and --devices go together."
        )
    if model is not None or mig is not None:
        try:
            kind = parse_kind(f"{MODEL}{model}" if model is not None else f"{MIG}{mig}")
        except ValueError:
            wrong = f"--mig must be a profile as in 3g.40gb, not {mig!r}."
            if mig is None:
                wrong = f"--model must be a name as in h200 or a100*, not {model!r}."
            raise click.UsageError(wrong) from None
        return ClaimRequest(count or 1, kinds=((kind, count or 1),))
    if devices is None:
        if count is None and not share:
            raise click.UsageError("say how many GPUs with -n N, or which with --devices.")
        return ClaimRequest(count or 1, share=share)
    wanted = tuple(device.id for device in match_device_list(devices, node.devices()))
    if count not in (None, len(wanted)):
        raise click.UsageError(f"-n {count} and --devices with {len(wanted)} do not fit.")
    return ClaimRequest(len(wanted), wanted, share=share)


def acquire_devices(
    session: Session, node: Node, record: Owner, want: ClaimRequest, wishes: ClaimWishes
) -> Grant:
    """Claim, waiting as long as is wished; raise Refusal.

    Where gpulockd serves users it claims for us, but not for another user's record. Of a share
    whose card has an MPS it waits for that.
    """
    if not socket_client.is_daemon_needed(node):
        process_claims.ensure_node_dirs(node)
    what = format_count(want.count, "share" if want.share else "GPU")
    ours = ClaimQuery(user=record.user, scheduler="process")
    last = find_last_claim(node, ours, HistoryFaults()) if wishes.prefer else None
    preferred = tuple(card.id for card in last.cards) if last else ()
    request = make_socket_request(record, want, wishes, preferred)
    serving = record.uid == os.geteuid() and socket_client.is_daemon_serving(node)
    try:
        if serving or socket_client.is_daemon_needed(node):
            how = socket_client.take_handed_wait(what, wishes.wait, session.program)
            grant = socket_client.request_daemon_claim(node, record, request, how)
        else:
            grant = claim_without_queue(node, record, want, request, Deadline(wishes.wait))
    except Refusal as refusal:
        if refusal.kind != BUSY or wishes.wait or "wait" in refusal.do:
            raise
        raise Refusal(BUSY, refusal.why, f"use --wait; {refusal.do}") from refusal
    if node.settings.share_mps and grant.owner.places:
        try:
            wait_for_mps(node, grant.owner, Deadline(CLAIM_SECONDS))
        except BaseException:
            release_cli_claim(node, grant, "its MPS did not start")
            raise
    return grant


def make_socket_request(
    record: Owner, want: ClaimRequest, wishes: ClaimWishes, preferred: tuple[str, ...]
) -> SocketRequest:
    """Return a claim as gpulockd is asked for it; how long it may wait is not in it yet."""
    return SocketRequest(
        *(CLAIM, record.pid, record.start, want.count, want.wanted),
        comment=record.comment,
        share=int(want.share),
        device_kind=want.kinds[0][0] if want.kinds else "",
        preferred=preferred,
        note=one_line(wishes.note[:LONGEST_NOTE]),
        seconds=wishes.seconds,
    )


def claim_without_queue(
    node: Node, record: Owner, want: ClaimRequest, request: SocketRequest, deadline: Deadline
) -> Grant:
    """Claim where no gpulockd serves, again and again until the deadline; raise Refusal."""
    is_told = False
    while True:
        try:
            at_the_gate = Deadline(CLAIM_SECONDS)
            grant = process_claims.claim_for_process(node, record, want, at_the_gate, request)
            if words := process_claims.describe_former_claim(grant):
                click.echo(f"gpulock: {words}", err=True)
            return grant
        except Refusal as refusal:
            if refusal.kind != BUSY or deadline.left() <= 0:
                raise
            if not is_told:
                why = refusal.why.partition(" (")[0]
                how = f"no gpulockd serves here, so there is no queue: tried every {PAUSE:.0f} s"
                click.echo(f"gpulock: waiting: {why}; {how}", err=True)
            is_told = True
        time.sleep(min(PAUSE, deadline.left()))


def release_cli_claim(node: Node, grant: Grant, how: str) -> None:
    """Give a claim back that is of no use."""
    if socket_client.is_daemon_needed(node):
        socket_client.request_daemon_release(node, grant.owner.pid)
        return
    token = grant.owner.token
    judge = make_liveness_judge(node)
    release_locks(node, lambda o: o.token == token, judge, Deadline(CLAIM_SECONDS), how)


def make_cli_owner(node: Node, pid: int, comment: str = "") -> Owner:
    """Return the record for a claim by `pid`, with its owner's name; raise Refusal."""
    record = process_claims.make_process_owner(node, pid, "", comment)
    return record.copy(user=uid_to_user_name(record.uid))


def make_grant_environment(
    grant: Grant, settings: Settings, environ: Mapping[str, str], binds: str
) -> tuple[set[str], dict[str, str]]:
    """Return which variables of `environ` are of another grant, and those of this one."""
    values = dict(environment.grant_variables(grant.devices, settings))
    if binds:
        own = environment.user_bind_lists(environ)
        values.update({name: environment.append_binds(old, binds) for name, old in own})
    stale = stale_mps_names(environ.items(), settings.mps_dir)
    stale |= environment.grant_variable_names() & environ.keys()
    return stale - values.keys(), values


def format_export_lines(node: Node, grant: Grant, binds: str) -> list[str]:
    """Return what a shell evaluates to have the environment of a grant, and of its claim."""
    stale, values = make_grant_environment(grant, node.settings, os.environ, binds)
    values[environs.CLAIM] = grant.owner.token
    exports = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    return [*(f"unset {name}" for name in sorted(stale)), *exports]
