# SPDX-License-Identifier: Apache-2.0
"""What `run` and `claim` share: their options, the line of waiting callers, the claim itself."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import click

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.alloc.release import release_locks
from gpulock.cli.claims import socket_client
from gpulock.cli.select import SelectError, match_device_list
from gpulock.cli.session import CommandRefusedError, Session, uid_to_user_name
from gpulock.deadline import Deadline, clock_boottime
from gpulock.job.mps import wait_for_mps
from gpulock.node.context import Node
from gpulock.node.kinds import MIG, MODEL, parse_kind
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.owner import Owner
from gpulock.text.words import format_count, format_device_list, format_duration, parse_duration
from gpulock.workstation import process_claims, tickets
from gpulock.workstation.backfill import must_yield

F = TypeVar("F", bound=Callable[..., object])
FOR_EVER = "for ever"
CLAIM_SECONDS = 60.0  # for one attempt, whose wait at the gate is LONGEST_WAIT


def parse_wait_option(ctx: click.Context, param: click.Parameter, value: str | None) -> float:
    """Return the seconds of --wait: none without it, no end without a duration."""
    if value is None:
        return 0.0
    try:
        return float("inf") if value == FOR_EVER else parse_duration(value)
    except ValueError as fault:
        raise click.BadParameter(f"{fault}. Put -- before the command.", ctx, param) from fault


class ClaimWishes(NamedTuple):
    """What the options of `claim_options` say, but for --wait."""

    number: int | None
    devices: str | None
    share: bool
    model: str | None
    mig: str | None


def claim_options(function: F) -> F:
    """Add the options that say how many devices, which (`wishes`), and how long to wait."""

    @functools.wraps(function)
    def collected(
        *rest: object,
        number: int | None,
        devices: str | None,
        share: bool,
        model: str | None,
        mig: str | None,
        **others: object,
    ) -> object:
        wishes = ClaimWishes(number, devices, share, model, mig)
        return function(*rest, wishes=wishes, **others)

    added: Callable[..., object] = collected
    for option in (
        click.option(
            "--wait",
            callback=parse_wait_option,
            is_flag=False,
            flag_value=FOR_EVER,
            metavar="[DURATION]",
            help="Wait in the queue: 90s, 30m, 1h; without a duration for ever.",
        ),
        click.option("--devices", metavar="LIST", help="Exactly these: 0,1, bus ids or UUIDs."),
        click.option("--model", metavar="NAME", help="Cards of this model: h200, 'a100*'."),
        click.option("--mig", metavar="PROFILE", help="MIG instances of this profile: 3g.40gb."),
        click.option("--share", is_flag=True, help="Places on a GPU that others share (SHARES)."),
        click.option(
            "-n", "number", type=click.IntRange(min=1), metavar="N", help="How many GPUs."
        ),
    ):
        added = option(added)
    return cast("F", added)


def open_node_for_claim(session: Session, wait: float) -> Node:
    """Return the node, on which we or gpulockd for us may claim; raise Refused or Refusal."""
    node = session.node()
    if socket_client.is_daemon_needed(node):
        socket_client.await_daemon(node, wait)  # nobody serves: say so before anything else
        return node
    return session.writable_node()


def prepare_claim_folders(node: Node) -> None:
    """Make LOCK_DIR and STATE_DIR where they are missing and ours; raise Refusal."""
    if not socket_client.is_daemon_needed(node):
        process_claims.ensure_node_dirs(node)


def make_claim_request(node: Node, wishes: ClaimWishes) -> ClaimRequest:
    """Return what is asked for; raise UsageError or Refused. Of a kind one is asked for without -n.

    Only one option names a kind or devices, but shares may be of certain cards.
    """
    count, devices, share, model, mig = wishes
    if (model is not None) + (mig is not None) + bool(share or devices is not None) > 1:
        raise click.UsageError("use one of --model, --mig, --share and --devices.")
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
    try:
        wanted = tuple(device.id for device in match_device_list(devices, node.devices()))
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "see gpulock status") from fault
    if count not in (None, len(wanted)):
        raise click.UsageError(f"-n {count} and --devices with {len(wanted)} do not fit.")
    return ClaimRequest(len(wanted), wanted, share=share)


def acquire_devices(node: Node, record: Owner, want: ClaimRequest, wait: float) -> Grant:
    """Claim in turn, waiting so long; raise Refusal or Refused.

    Where LOCK_DIR is another's, its gpulockd claims for us. Of a share whose card has an MPS it
    waits for that.
    """
    grant = wait_for_grant(node, record, want, wait)
    if node.settings.share_mps and grant.owner.places:
        try:
            wait_for_mps(node, grant.owner, Deadline(CLAIM_SECONDS))
        except BaseException:
            release_cli_claim(node, grant, "its MPS did not start")
            raise
    return grant


def wait_for_grant(node: Node, record: Owner, want: ClaimRequest, wait: float) -> Grant:
    """Claim in turn, waiting so long; raise Refusal or Refused."""
    line = WaitProgress(format_count(want.count, "share" if want.share else "GPU"))
    try:
        if socket_client.is_daemon_needed(node):
            return socket_client.request_daemon_claim(node, record, want, wait, line.show_waiting)
        refuse_second_claim(node, record, want)
        return tickets.claim_in_turn(
            node,
            lambda: process_claims.claim_for_process(node, record, want, Deadline(CLAIM_SECONDS)),
            Deadline(wait),
            line.show_waiting,
            lambda: must_yield(node, want),
            record.uid,
        )
    finally:
        line.end()


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


def refuse_second_claim(node: Node, record: Owner, want: ClaimRequest) -> None:
    """Raise Refused when the process holds another grant: one claim a process."""
    other = process_claims.find_other_process_grant(node, record, want)
    if other:
        raise CommandRefusedError(
            f"pid {record.pid} holds {format_device_list(other, node.devices())} already",
            f"gpulock release --pid {record.pid} first",
        )


class WaitProgress:
    """What a waiting caller is told on stderr: one line, kept up to date on a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = clock_boottime()
        self._last = ""
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show_waiting(self, before: int, why: str) -> None:
        """Say how many callers are before this one, or what is in the way."""
        short = why.partition(" (")[0]  # who has which: `gpulock status` says it better
        reason = f"{format_count(before, 'caller')} ahead" if before else f"next; {short}"
        if self._live:
            waited = format_duration(clock_boottime() - self._begun)
            text = f"gpulock: waiting {waited} for {self._what}: "
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(f"\r\x1b[K{(text + reason)[: max(20, width - 1)]}")
            sys.stderr.flush()
        elif reason != self._last:
            click.echo(f"gpulock: waiting for {self._what}: {reason}", err=True)
        self._last = reason

    def end(self) -> None:
        """Leave a clean line behind."""
        if self._live and self._last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
