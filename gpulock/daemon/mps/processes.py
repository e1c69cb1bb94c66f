# SPDX-License-Identifier: Apache-2.0
"""The processes of one card's MPS: start the daemon, ask it, find all of them, end them.

`nvidia-cuda-mps-control -d` goes into the background by itself and starts a server for the user
(docs/facts/nvml.md, mps). Nothing here waits: what takes time is a generator that yields for how
many seconds it has nothing to do.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final

from gpulock.alloc.process_owner import ProcessTree, is_mps_process, program_name
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.mps.folder import MpsError, read_control_log
from gpulock.deadline import clock_boottime
from gpulock.job.mps import LOGS, PIPE_DIRECTORY, PIPES, mps_folder
from gpulock.node.context import Node
from gpulock.node.devices import Device

DAEMON: Final = "nvidia-cuda-mps-control"
COMM: Final = "nvidia-cuda-mps"  # as the kernel cuts it
TURN: Final = 0.05  # seconds between two looks
START_SECONDS: Final = 12.0  # from the first program to a server that is there
ASK_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 4096
NOBODY_THERE: Final = (0, 0)

Steps = Generator[float, None, None]


@dataclass
class MpsSite:
    """One card's MPS: whose it is, where, and its daemon once that is known."""

    node: Node
    card: Device
    uid: int
    gid: int = -1
    groups: list[int] = field(default_factory=list[int])
    control: tuple[int, int] = NOBODY_THERE  # pid, start

    @property
    def folder(self) -> str:
        """Return the card's folder below MPS_DIR."""
        return mps_folder(self.node.settings.mps_dir, self.card.bus)

    @property
    def pipes(self) -> str:
        """Return where its clients find it."""
        return f"{self.folder}/{PIPES}"

    @property
    def mark(self) -> str:
        """Return what the lock of a place says of it."""
        return f"{self.control[0]} {self.control[1]}"

    def runs(self) -> bool:
        """Return whether its daemon runs."""
        try:
            return self.control != NOBODY_THERE and self.node.proc.running(*self.control)
        except (OSError, ValueError):
            return False

    def start_program(self, *words: str) -> subprocess.Popen[bytes]:
        """Start MPS_CONTROL as the card's user, in a session of its own; raise OSError."""
        environ = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": self.card.uuid,
            PIPE_DIRECTORY: self.pipes,
            "CUDA_MPS_LOG_DIRECTORY": f"{self.folder}/{LOGS}",
        }
        asks = subprocess.DEVNULL if words else subprocess.PIPE
        switch = os.geteuid() != self.uid
        return subprocess.Popen(
            [self.node.settings.mps_control, *words],
            stdin=asks,
            stdout=asks,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environ,
            start_new_session=True,
            user=self.uid if switch else None,
            group=self.gid if switch else None,
            extra_groups=self.groups if switch else None,
        )


def find_user_groups(uid: int) -> tuple[int, list[int]]:
    """Return the group of a user, and all of them; raise MpsError. It may ask a name service."""
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        raise MpsError(f"this node knows no user {uid}") from None
    return found.pw_gid, os.getgrouplist(found.pw_name, found.pw_gid)


def learn_groups(site: MpsSite) -> Steps:
    """Find out the groups of the card's user; raise MpsError."""
    asked = BackgroundCall(lambda: find_user_groups(site.uid))
    late = clock_boottime() + ASK_SECONDS
    while not asked.wait(0.0):
        if clock_boottime() > late:
            raise MpsError(f"the groups of user {site.uid} cannot be found out in time")
        yield TURN
    site.gid, site.groups = asked.answer()


def start_daemon(site: MpsSite) -> Steps:
    """Start the daemon and its server; `site.control` is it then. Raises MpsError or OSError."""
    late = clock_boottime() + START_SECONDS
    child = site.start_program("-d")
    try:
        while child.poll() is None:
            if clock_boottime() > late:
                raise MpsError(f"{DAEMON} -d does not go into the background")
            yield TURN
    finally:
        end_child(child)
    if child.returncode:
        said = read_control_log(site.folder)
        raise MpsError(f"{DAEMON} -d ended with {child.returncode}{said and f': {said}'}")
    while (found := find_daemon(site)) is None:
        if clock_boottime() > late:
            raise MpsError(f"{DAEMON} is not there: {read_control_log(site.folder) or 'no log'}")
        yield TURN
    site.control = found
    words = f"start_server -uid {site.uid}\nget_server_list\n"
    while not any(word.isdecimal() for word in (yield from ask_daemon(site, words)).split()):
        words = "get_server_list\n"
        if clock_boottime() > late:
            raise MpsError(f"it has no server: {read_control_log(site.folder) or 'no log'}")
        yield TURN


def ask_daemon(site: MpsSite, words: str) -> Generator[float, None, str]:
    """Return what the daemon answers to some commands; raise MpsError or OSError."""
    child = site.start_program()
    late = clock_boottime() + ASK_SECONDS
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        try:
            os.write(child.stdin.fileno(), words.encode())
            child.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, and says why by its exit code
        while child.poll() is None:
            if clock_boottime() > late:
                raise MpsError(f"{DAEMON} does not answer in {ASK_SECONDS:.0f} s")
            yield TURN
        if child.returncode:
            raise MpsError(f"{DAEMON} ended with {child.returncode} when it was asked")
        os.set_blocking(child.stdout.fileno(), False)
        try:
            return os.read(child.stdout.fileno(), ANSWER_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""
    finally:
        end_child(child)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and let go of its pipes; nobody waits for it."""
    if child.poll() is None:
        child.kill()
        BackgroundCall(child.wait)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue


def find_daemon(site: MpsSite) -> tuple[int, int] | None:
    """Return (pid, start) of the daemon in the background, None where it is not there."""
    proc = site.node.proc
    for pid, start in list_mps_processes(site).items():
        try:
            words = proc.read_memory(pid, "cmdline").split(b"\0")
            if program_name(proc, pid) == DAEMON and b"-d" in words and proc.stat(pid).ppid:
                return pid, start
        except (OSError, ValueError):
            continue
    return None


def list_mps_processes(site: MpsSite) -> dict[int, int]:
    """Return pid -> start of each process of this MPS.

    It is the user's, has the card's pipes in its environment, and has the name of one of MPS's
    programs or comes from the daemon. A job of the user has the same environment, and no more.
    """
    proc = site.node.proc
    tree, wanted = ProcessTree(proc), f"{PIPE_DIRECTORY}={site.pipes}".encode()
    found: dict[int, int] = {}
    for pid in proc.pids():
        try:
            status = tree.status(pid)
            if status.uids[0] != site.uid or status.kernel:
                continue
            named = status.name.startswith(COMM)
            if not (named or is_mps_process(pid, site.mark, tree)):
                continue
            start = proc.start(pid)
            if wanted in proc.read_memory(pid, "environ").split(b"\0") and proc.running(pid, start):
                found[pid] = start
        except (OSError, ValueError):
            continue
    return found


def kill_mps_processes(site: MpsSite) -> int:
    """Kill every process of this MPS; return how many there were."""
    found = list_mps_processes(site)
    for pid, start in found.items():
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if site.node.proc.running(pid, start):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
    return len(found)
