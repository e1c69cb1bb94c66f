# SPDX-License-Identifier: Apache-2.0
"""A shared workstation: real users, a real gpulockd, cards that are only to be seen.

Everything runs in a pid namespace of its own, where no scheduler's daemon is to be seen: else
gpulockd would serve nobody, and rightly so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.workstation.waiting import WaitingCaller, read_waiting
from tests.support.wait import wait_ended, wait_exit, wait_until

CHECKOUT = Path(__file__).resolve().parents[3]
HIDDEN = ("SIMULATION=", "LOCK_DIR=", "STATE_DIR=", "PROC_ROOT=")
SETTINGS = ("USER_CLAIMS=yes", "RESERVE_MAX=14400")
LIBRARY = f"import sys; sys.path[:0] = [{str(CHECKOUT)!r}]; "
GPULOCK = f"{LIBRARY}from gpulock.cli import main; main()"
GPULOCKD = f"{LIBRARY}from gpulock.daemon.app import main; sys.exit(main())"
HOLDER = Path(__file__).with_name("daemon_holder.py")

Process = subprocess.Popen[bytes]


class Site:
    """The workstation below `root`, which everybody may read."""

    def __init__(self, root: Path) -> None:
        node = write_simulated_node(root / "node", "dgx1")
        lines = node.config.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(HIDDEN)]
        self.root = root
        self.lock = root / "lock"
        self.config = root / "gpulock.conf"
        own = (f"LOCK_DIR={self.lock}", f"STATE_DIR={root / 'state'}", *SETTINGS)
        self.config.write_text("\n".join([*kept, *own]) + "\n")
        self.taken = (
            root / "taken"
        )  # one file a device, locked by the process that believes to have it
        self.taken.mkdir()
        self.taken.chmod(0o1777)
        (root / "state").mkdir()
        self.log = root / "daemon.log"
        self.daemon = self.start_daemon()

    def start_daemon(self) -> Process:
        """Start a gpulockd, and wait until it serves."""
        argv = [sys.executable, "-c", GPULOCKD, "--config", str(self.config)]
        before = self.served()
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(argv, stderr=log)
        wait_until(lambda: self.served() not in (0, before), why="gpulockd to serve")
        return self.daemon

    def served(self) -> int:
        """Return which socket there is, 0 for none: a new gpulockd makes it anew."""
        try:
            return os.stat(self.lock / "socket").st_ino
        except FileNotFoundError:
            return 0

    def run(self, uid: int, *words: str, seconds: float = 0.0) -> Process:
        """Let a user run a command that holds its devices so long."""
        command = [sys.executable, "-IS", str(HOLDER), str(self.taken), str(seconds)]
        return self.gpulock(uid, "run", *words, "--", *command)

    def gpulock(self, uid: int, *words: str) -> Process:
        """Let a user call gpulock."""
        argv = [sys.executable, "-c", GPULOCK, "--config", str(self.config), *words]
        return subprocess.Popen(
            argv,
            user=uid,
            group=uid,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin", "HOME": "/"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def locks(self) -> list[str]:
        """Return what is locked."""
        return sorted(os.listdir(self.lock / "locks"))

    def line(self) -> list[WaitingCaller]:
        """Return who stands in line."""
        return read_waiting(Node(read_settings(str(self.config))))

    def events(self) -> list[list[str]]:
        """Return what the holders wrote: take, give or double; pid; uid; devices."""
        path = self.taken / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        """End gpulockd."""
        self.daemon.terminate()
        wait_exit(self.daemon, why="gpulockd to stop")


def said(process: Process) -> str:
    """Return what a program that has ended said."""
    wait_ended([process.pid], why=f"{process.args!r} to end")
    return process.communicate()[0].decode()
