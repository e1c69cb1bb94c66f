# SPDX-License-Identifier: Apache-2.0
"""HEALTH_COMMAND on one free card: started, locked in its name, ended at its deadline.

Its process owns the lock, so any claim, reap or reconcile proves it dead as it does any other
owner. A claim that is short marks the lock: then gpulockd ends the test and releases the
card. It waits for the process only once the lock is gone. Its number is nobody else's then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from gpulock.alloc.reaper import DIED
from gpulock.alloc.release import release_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import one_line
from gpulock.job.mps import cards_with_mps
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import grants
from gpulock.store.gate import Gate
from gpulock.store.owner import HEALTH_COMMENT, HEALTH_USER
from gpulock.store.quarantine import RESERVE, list_noted_devices
from gpulock.store.repair import repair_locks
from gpulock.workstation.process_claims import make_process_owner

NOBODY: Final = 65534  # the kernel's overflow uid and gid: nobody
GATE_SECONDS: Final = 1.0
TEST_SECONDS: Final = 1800.0  # seconds of a test: `dcgmi diag -r 3` takes half of it on eight cards
ENDING: Final = 10.0  # seconds that SIGKILL takes at most, but in a driver that hangs
CLOSING: Final = 2.0  # seconds of it when gpulockd ends
WORDS_KEPT: Final = 200  # bytes of the last line that the command wrote
# Ends of a test that are others' doing, and tell nothing of a card: the OOM killer, a limit of CPU
# time or file size, a service manager, a person.
OTHERS_SIGNALS: Final = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM),
    *(signal.SIGXCPU, signal.SIGXFSZ),
)
OF_SHELL: Final = 128  # and a signal: so a shell ends whose own child was ended by that
NOT_RUN: Final = (126, 127)  # of a shell and setpriv(1): what was to run cannot be run
MOST_READS: Final = 16  # between two looks
# It is started first, and the card locked in the name of its pid. A line on stdin says that the
# card is locked; the end of stdin that it is not, or that gpulockd is gone. The kernel kills the
# program when gpulockd dies.
SET_RIGHTS: Final = ("setpriv", "--no-new-privs", "--pdeathsig", "KILL")
WAIT: Final = ("/bin/sh", "-c", 'read -r go || exit 126; exec "$@" </dev/null', "sh")


class CheckOutcome(NamedTuple):
    """How a test ended: whether the card `passed`, and why that is so.

    None where it tells nothing of the card; without words it gave way to a claim.
    """

    passed: bool | None
    words: str


class HealthCommand:
    """The command at work on the card `bus`; times are CLOCK_BOOTTIME seconds."""

    def __init__(self, node: Node, device: Device, now: float) -> None:
        """Start it and lock the card; raise OSError or Refusal, CardTakenError where it is held."""
        settings = node.settings
        self.bus = device.bus
        self.begun = now
        self._killed: float | None = None  # when, for it took too long
        self._gives_way = False  # it was ended for a claim
        self._text = b""  # the end of what it wrote
        uid = os.geteuid() or NOBODY
        user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        self._process = subprocess.Popen(
            [*SET_RIGHTS, *(user if os.geteuid() == 0 else ()), *WAIT, *settings.health_command],
            env=build_check_environment(device),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)  # this end alone: the command's own waits
        try:
            self.token = lock_for_check(node, device, self.pid, uid)
            with suppress(BrokenPipeError):  # a claim has taken the card back already
                os.write(self._process.stdin.fileno(), b"go\n")
        except BaseException:
            self.kill()
            self._process.wait()
            self._output.close()
            raise
        finally:
            self._process.stdin.close()

    def poll(self, node: Node, now: float) -> CheckOutcome | None:
        """Return None while it runs or its lock stands, then how it ended; raise Refusal.

        One that SIGKILL does not end is no more looked after: its lock goes as any dead owner's,
        once it is gone.
        """
        late = f"it took longer than {TEST_SECONDS:.0f} s"
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self._drain_output()
        if info is None:
            if self._killed is not None:
                ending = now < self._killed + ENDING
                return None if ending else CheckOutcome(False, f"{late}, and cannot be ended")
            if now >= self.begun + TEST_SECONDS:
                self._killed = now
            self._gives_way |= is_check_asked_to_end(node, self.bus, self.token)
            if self._killed is not None or self._gives_way:
                self.kill()
            return None
        self.kill()  # what it left behind: its number is still that of its group
        if not release_check(node, self.token):
            return None  # of what it left behind something runs
        self._process.wait()
        self._output.close()
        said = self._last_line()
        if self._killed is not None:
            return CheckOutcome(False, late)
        if self._gives_way:
            return CheckOutcome(None, "")
        number, exited = info.si_status, info.si_code == os.CLD_EXITED
        words = f"it ended with {number}" if exited else f"signal {number} ended it"
        words = one_line(f"{words}: {said}" if said else words)
        if is_others_doing(number, exited):
            return CheckOutcome(None, words)
        return CheckOutcome(exited and number == 0, words)

    def kill(self) -> None:
        """End it with its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it: the daemon ends. Its lock is a dead owner's."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSING)
        self._output.close()

    def _drain_output(self) -> None:
        """Take what it wrote out of the pipe, so that it can write on, and keep the end."""
        for _ in range(MOST_READS):
            more = self._output.read(1 << 16) or b""  # None where nothing is there yet
            self._text = (self._text + more)[-4 * WORDS_KEPT :]

    def _last_line(self) -> str:
        """Return the last line that it wrote."""
        lines = self._text.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:WORDS_KEPT]


class CardTakenError(Exception):
    """Say that somebody has the card, or may have."""


def is_others_doing(number: int, exited: bool) -> bool:
    """Return whether an exit code, or a signal, says that the test itself had no word; pure."""
    if exited and number in NOT_RUN:
        return True
    return (number - OF_SHELL if exited else number) in OTHERS_SIGNALS


def build_check_environment(device: Device) -> Mapping[str, str]:
    """Return the whole environment of the command: which card it is to test."""
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": device.uuid or str(device.index),
        "GPULOCK_DEVICE": device.bus,
        "GPULOCK_INDEX": str(device.index),
        "GPULOCK_UUID": device.uuid,
    }


def is_check_asked_to_end(node: Node, bus: str, token: str) -> bool:
    """Return whether a claim has asked for the card of a check."""
    record = node.store.read(bus).owner
    return record is not None and record.token == token and not record.gives_way()


def release_check(node: Node, token: str) -> bool:
    """Release the lock of a check, once its processes are proven dead; return whether it is gone.

    Raises Refusal.
    """
    judge, deadline = make_liveness_judge(node), Deadline(GATE_SECONDS)
    done = release_locks(node, lambda one: one.token == token, judge, deadline, "checked", DIED)
    return not done.kept


def lock_for_check(node: Node, device: Device, pid: int, uid: int) -> str:
    """Lock a card in the name of a test's process; return the token.

    Raises CardTakenError, Refusal or OSError.
    """
    store = node.store
    with Gate(store, Deadline(GATE_SECONDS)):
        if store.boot_id() != node.boot_id:
            raise CardTakenError("no claim was made in this boot")
        taken = {*repair_locks(store, node.boot_id)}
        taken |= {*list_noted_devices(node.settings.state_dir, RESERVE)}
        taken |= {*cards_with_mps(node.settings, node.boot_id, None)}
        if any(lock_ids_overlap(name, device.bus) for name in taken):
            raise CardTakenError(device.bus)
        record = make_process_owner(node, pid, HEALTH_USER, HEALTH_COMMENT).copy(
            uid=uid,
            sid=pid,
            claimed_at=time.time(),
            claimed_boottime=clock_boottime(),
            token=os.urandom(8).hex(),
            uuids=(device.uuid,),
            minors=(str(device.minor),),
            devices=(device.bus,),
        )
        grants.make_claim(store, record)
    return record.token
