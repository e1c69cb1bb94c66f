# SPDX-License-Identifier: Apache-2.0
"""A real gpulockd on a node of a lab, in the node's own namespaces; what it says, frees, writes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import Self

from gpulock.deadline import clock_boottime
from gpulock.store import verdicts
from gpulock.store.locks import LockStore
from gpulock.store.verdicts import Verdict
from tests.labs.common.installed import CONFIG, Installed
from tests.labs.daemon.daemon_site import GPULOCKD
from tests.labs.daemon.daemon_witness import Claim, claims_of
from tests.labs.sge.machines import PATH
from tests.support.history_site import read_history
from tests.support.wait import wait_exit, wait_until

# A gpulockd that reconciles at once where it sees a reason to, and never because time has passed.
WITHOUT_PERIOD = GPULOCKD.replace(
    "from gpulock.daemon",
    "from gpulock.store import verdicts; verdicts.PERIOD = 86400.0; from gpulock.daemon",
)
# the other two show what a process was started with (may_access_mm in kernel/fork.c, Linux 6.18)
SIGHT = "-sys_ptrace,-perfmon,-sys_admin"
WITHOUT_PTRACE = ("setpriv", f"--bounding-set={SIGHT}", f"--inh-caps={SIGHT}")
HASTE = "processes came and went faster than"  # they could be read: nothing of theirs is freed
CONTAINED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class Daemon:
    """A gpulockd on one node; `lock_dir` and `state_dir` are where this process finds them.

    It tells us by its service manager's socket when a reconcile is over.
    """

    def __init__(
        self,
        enter: Sequence[str],
        lock_dir: Path,
        log: Path,
        around: Sequence[str],
        program: str = GPULOCKD,
    ) -> None:
        self.lock_dir = lock_dir
        self.state_dir = lock_dir.parents[1] / "var/lib/gpulock"
        self.pid = 0
        self._before = 0  # characters that an earlier one said
        self._log = log
        self._argv = [*enter, *around, sys.executable, "-c", program, "--config", CONFIG]
        self._forks = "--fork" in around
        self._address = log.with_suffix(".notify")
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._address.unlink(missing_ok=True)
        self._told.bind(str(self._address))
        log.write_bytes(b"")
        self.launch()

    # --- its life -----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._drain()
        self._before = len(self.said())
        env = {"PATH": PATH, "NOTIFY_SOCKET": str(self._address)}
        with self._log.open("ab") as stderr:
            self.process = subprocess.Popen(self._argv, stderr=stderr, env=env)
        self.pid = 0 if self._forks else self.process.pid

    def ready(self) -> Self:
        """Wait until its first reconcile is over."""
        self._await(lambda told: "READY=1" in told)
        if self._forks:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            self.pid = int(children.read_text())
        return self

    def crash(self) -> None:
        """Kill it, as an OOM killer would."""
        self.process.kill()
        wait_exit(self.process, why="the killed gpulockd to end")

    def restart(self) -> None:
        """Start it again after a crash."""
        self.launch()
        self.ready()

    def stop(self) -> None:
        """End it as its service manager does."""
        if self.process.returncode is None:
            os.kill(self.pid or self.process.pid, signal.SIGTERM)
            code = wait_exit(self.process, why="gpulockd to stop")
            assert code == 0, f"{code}: {self.said()}"

    def close(self) -> None:
        """Leave nothing of it behind, whatever it did."""
        if self.process.poll() is None:
            self.crash()
        self._told.close()
        self._address.unlink(missing_ok=True)

    # --- its work -----------------------------------------------------------------------------

    def goes_round(self) -> None:
        """Have it reconcile, and wait until one that began after this call is over.

        One at which processes came and went too fast to be seen, and all is held, is none.
        """
        wait_until(self._sees, why="a look at all processes")

    def _sees(self) -> bool:
        """Have it reconcile; return whether it could read all processes."""
        self._drain()
        since = time.monotonic_ns() // 1000  # as RELOADING counts
        os.kill(self.pid, signal.SIGHUP)

        def begun(told: dict[str, str]) -> bool:
            return "RELOADING=1" in told and int(told["RELOADING=1"]) >= since

        self._await(begun)
        self._await(lambda told: "READY=1" in told)
        told = [line for line in self.said()[self._before :].splitlines() if HASTE in line]
        return not told or "no longer: " in told[-1]

    def rounds_until(self, holds: Callable[[], object], what: str) -> None:
        """Have it reconcile until something holds."""

        def so() -> object:
            self.goes_round()
            return holds()

        wait_until(so, why=what)

    def frees(self, locked: Callable[[], object]) -> None:
        """Wait until nothing is `locked` any more and that is told."""
        wait_until(lambda: not locked(), why="gpulockd to free")
        self.goes_round()  # the one that freed says so when the gate is open again

    # --- what it leaves -----------------------------------------------------------------------

    def said(self) -> str:
        """Return all that it said."""
        return self._log.read_text()

    def freed(self) -> list[str]:
        """Return what it said of what it freed."""
        return [line for line in self.said().splitlines() if line.startswith("gpulockd: freed ")]

    def claim(self, job: int) -> Claim:
        """Return the one claim of a job."""
        (found,) = claims_of(self.lock_dir / "locks", job)
        return found

    def verdict(self, claim: Claim) -> Verdict | None:
        """Return what it published of a claim, None where that is over."""
        boot_id = LockStore(str(self.lock_dir)).boot_id()
        found, _ = verdicts.read_dated_verdicts(str(self.lock_dir), clock_boottime(), boot_id)
        assert found is not None, "there are no fresh verdicts"
        return found.get(claim.token)

    def history(self) -> list[dict[str, Any]]:
        """Return the finished claims of its node."""
        return read_history(self.state_dir)

    # --- inner --------------------------------------------------------------------------------

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._told.recv(4096)

    def _await(self, holds: Callable[[dict[str, str]], bool]) -> None:
        """Wait for a message that `holds`; its dates are RELOADING's own."""

        def came() -> bool:
            while select.select([self._told], [], [], 0.2)[0]:
                lines = self._told.recv(4096).decode().splitlines()
                since = [line.partition("=")[2] for line in lines if "_USEC=" in line]
                if holds({line: since[0] if since else "" for line in lines}):
                    return True
            assert self.process.poll() is None, f"gpulockd ended:\n{self.said()}"
            return False

        wait_until(came, why="a reconcile")


@contextlib.contextmanager
def daemon_on(
    gpus: Installed, node: str, *around: str, program: str = GPULOCKD
) -> Generator[Daemon]:
    """Run a gpulockd on a node, ended at last; `around` are words before its command."""
    lab = gpus.cluster
    enter, lock_dir = lab.machines[node].enter(), lab.path_in(node, "/run/gpulock")
    daemon = Daemon(enter, lock_dir, lab.lab / "gpulockd.log", around, program)
    try:
        yield daemon.ready()
        daemon.stop()
    finally:
        daemon.close()


# --- what must hold of a claim ----------------------------------------------------------------


def assert_held(daemon: Daemon, claim: Claim, proof: str, state: str = "alive") -> None:
    """Have it look twice: it keeps every device of a claim, and publishes why."""
    for _ in range(2):
        daemon.goes_round()
        assert claim.locked() == claim.devices, daemon.said()
    verdict = daemon.verdict(claim)
    assert verdict is not None
    assert verdict.state == state and proof in verdict.proof, verdict.proof
    assert claim.token not in {line["token"] for line in daemon.history()}


def assert_freed(daemon: Daemon, claim: Claim, proof: str) -> dict[str, Any]:
    """Have it look once: all is free and told, with one line in the history, which is returned."""
    daemon.goes_round()
    assert claim.locked() == (), daemon.said()
    return assert_over(daemon, claim, proof)


def assert_over(daemon: Daemon, claim: Claim, proof: str, how: str = "reap") -> dict[str, Any]:
    """What was freed is told with its proof, in no verdict, and in the history once."""
    assert daemon.verdict(claim) is None
    (line,) = [line for line in daemon.history() if line["token"] == claim.token]
    assert line["how"] == how and proof in line["proof"], line
    assert tuple(one["id"] for one in line["devices"]) == claim.devices
    if how == "reap":
        told = [said for said in daemon.freed() if f" of job {line['job_id']}" in said]
        assert any(claim.devices[-1] in said and proof in said for said in told), daemon.said()
    return line


@contextlib.contextmanager
def restless(daemon: Daemon) -> Generator[list[int]]:
    """Let it reconcile as fast as it can; yield a list that grows with each of them."""
    rounds: list[int] = []
    over = threading.Event()

    def go() -> None:
        while not over.is_set():
            daemon.goes_round()
            rounds.append(daemon.pid)

    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(go)
        try:
            yield rounds
        finally:
            over.set()
    going.result()
