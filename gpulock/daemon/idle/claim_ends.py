# SPDX-License-Identifier: Apache-2.0
"""The end that a user chose for a claim, or CLAIM_MAX did: told before, and then given back.

Warm, gpulockd alone. Ten minutes before, the terminal of the claim's process is told, and
IDLE_COMMAND is run with `end`; not for a claim of ten minutes or less. At its end a claim of a
shell is released, unless something of it besides the shell still runs. One whose record has a
comment is of a process that is the work: it is reaped once that has ended.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

from gpulock.alloc.reaper import ENDED, HELD
from gpulock.daemon.core.journal import INFO, DaemonJournal
from gpulock.daemon.idle.command import ClaimFacts
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.workstation.user_release import release_unused

BEFORE: Final = 600.0  # seconds before its end at which a user is told
AGAIN: Final = 2.0  # seconds until a release that failed is tried again, at least
SPARING: Final = 20  # times as long as that release took, at least
GATE_SECONDS: Final = 2.0
PTS: Final = range(136, 144)  # major numbers of /dev/pts, Documentation/admin-guide/devices.txt
TERMINAL: Final = 4  # field of stat behind the program's name, proc_pid_stat(5)


class ClaimEnds(Chore):
    """The chore that follows a reconcile; `tell_command` is for IDLE_COMMAND."""

    def __init__(self, journal: DaemonJournal, tell_command: Callable[[ClaimFacts], None]) -> None:
        self._journal = journal
        self._tell_command = tell_command
        self._labels: dict[str, str] = {}  # of devices, by id
        self._warned: set[str] = set()  # tokens
        # by token, when its release is tried again, and why it failed
        self._again: dict[str, tuple[float, str]] = {}

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Tell who is near the end of a claim, and give back what is over."""
        claims = find_limited_claims(node, report)
        self._labels = {device.id: device.label() for device in report.devices}
        self._warned &= claims.keys()
        self._again = {token: failed for token, failed in self._again.items() if token in claims}
        held: dict[str, str] = {}
        served: set[int] = set()  # one claim of a user a round: each looks at the user's files
        for token, record in claims.items():
            if now >= record.until:
                what, who = self._name(record), f"pid {record.pid} ({record.user})"
                due = not record.comment and now >= self._again.get(token, (now, ""))[0]
                if due and record.uid not in served:
                    served.add(record.uid)
                    self._release(node, record, now)
                if record.comment:
                    held[token] = f"{who} holds {what} beyond its end"
                elif token in self._again:
                    why = self._again[token][1]
                    held[token] = f"{what} of {who} is held beyond its end: {why}"
            elif (
                now >= record.until - BEFORE > record.claimed_boottime and token not in self._warned
            ):
                self._warned.add(token)
                left = f"{(record.until - now) / 60:.0f} min"
                keeps = "what still runs keeps it"
                words = f"your claim of {self._name(record)} ends in {left}; {keeps}"
                tell_terminal(node, record, words)
                self._tell_command(ClaimFacts(record, record.devices, 0.0, alive=True))
        self._journal.log_changes("ends", held)
        to_come = [one.until for one in claims.values() if one.until > now]
        again = [at for at, _ in self._again.values()]
        report.next_at = min([report.next_at, *to_come, *again])

    def _release(self, node: Node, record: Owner, now: float) -> None:
        """Give a claim back that is over, or note when to try again."""

        def meant(lock: Lock) -> bool:
            return lock.owner is not None and lock.owner.token == record.token

        begun = clock_boottime()
        try:
            how = "its end has come"
            release_unused(node, meant, (record.uid, 0), Deadline(GATE_SECONDS), how, ENDED)
        except (Refusal, OSError) as fault:
            took = clock_boottime() - begun
            self._again[record.token] = now + max(AGAIN, SPARING * took), str(fault)
            return
        who = f"pid {record.pid} ({record.user})"
        self._journal.say(INFO, f"{self._name(record)} of {who} given back: its end has come")
        do = "unset CUDA_VISIBLE_DEVICES and what else names them"
        tell_terminal(node, record, f"your claim of {self._name(record)} is over: {do}")

    def _name(self, record: Owner) -> str:
        """Return the devices of a claim by their numbers, where those are known."""
        cards = dict.fromkeys([name.partition(SHARE)[0] for name in record.devices])
        names = [self._labels.get(card, card) for card in cards]
        return f"GPU{'s' if len(names) > 1 else ''} {', '.join(names)}"


def find_limited_claims(node: Node, report: ReconcileReport) -> dict[str, Owner]:
    """Return the claims of users that have an end, by token."""
    held = [one.lock.owner for one in report.outcomes if one.act == HELD]
    users = [one for one in held if one and one.scheduler == "process" and one.until]
    return {one.token: one for one in users if one.boot_id == node.boot_id}


def tell_terminal(node: Node, record: Owner, text: str) -> None:
    """Write a line to the terminal of a claim's process, where that is its user's.

    One that is stopped (Ctrl-S), full or gone misses it.
    """
    try:
        if not node.proc.running(record.pid, record.start):
            return
        fields = node.proc.read(record.pid, "stat").rpartition(b")")[2].split()
        number = int(fields[TERMINAL])
        device = os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)
        if os.major(device) not in PTS:
            return
        index = (os.major(device) - PTS[0]) * 256 + os.minor(device)
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"/dev/pts/{index}", flags)
        try:
            info = os.fstat(fd)
            same = stat.S_ISCHR(info.st_mode) and info.st_rdev == device
            if same and info.st_uid == record.uid:
                os.write(fd, f"\r\ngpulock: {text}\r\n".encode())
        finally:
            os.close(fd)
    except (OSError, ValueError, IndexError):
        return
