# SPDX-License-Identifier: Apache-2.0
"""What doctor says of gpulockd, with systemd or without: whether it runs, and what waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.install.doctor.check import Check, fault, ok, run_checks, warning
from gpulock.install.systemd import manager
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.verdicts import FRESH, read_dated_verdicts
from gpulock.workstation.tickets import is_stopped

NAME = "daemon"
_RESTART = "see its log, then: systemctl restart gpulockd"


def daemon_checks(settings: Settings) -> list[Check]:
    """Return the checks of gpulockd as a process."""
    return run_checks(NAME, lambda: check_daemon_runs(settings))


def check_daemon_runs(settings: Settings) -> Iterator[Check]:
    """Tell whether gpulockd runs; where it does not, what of this node's settings needs it."""
    node, now = Node(settings), clock_boottime()
    _, reaped = read_dated_verdicts(settings.lock_dir, now, node.boot_id)
    if pid := find_running_daemon(settings.lock_dir, settings.proc_root):
        if is_stopped(node, pid) or (reaped is not None and now - reaped > FRESH):
            since = f" since {now - reaped:.0f} s" if reaped is not None else ""
            yield fault(f"gpulockd, pid {pid}, does not answer{since}", _RESTART)
        else:
            yield ok(f"gpulockd runs, pid {pid}")
        return
    start = "start gpulockd" + (" (gpulock install systemd)" if manager.RUNNING.is_dir() else "")
    if needed := needs_of_daemon(settings, has_unknown_instances(node)):
        yield fault(f"gpulockd does not run: {'; '.join(needed)}", start)
    if reaped is None or now - reaped > FRESH:
        do = f"{start}, or run gpulock reap from cron every minute"
        yield warning("gpulockd does not run: what a hook could not free stays locked", do)
    elif not needed:
        yield ok(f"gpulockd does not run; gpulock reap did {now - reaped:.0f} s ago")


def needs_of_daemon(settings: Settings, unknown_instances: bool) -> list[str]:
    """Return what this node offers that nobody gets while gpulockd does not run; pure."""
    needs = {
        "USER_CLAIMS=yes serves no user": settings.user_claims,
        "SHARE_MPS=yes gives no share": settings.share_mps,
        "a card in MIG mode gives no instance": unknown_instances,
    }
    return [what for what, needed in needs.items() if needed]


def has_unknown_instances(node: Node) -> bool:
    """Say whether a card is in MIG mode and nobody has told its instances."""
    try:
        return any(device.withheld for device in node.devices())
    except Refusal:
        return False  # the driver's own check says so
