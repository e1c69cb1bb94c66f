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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gpulock.alloc.process_owner import ProcessTree, program_name
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.mps.folder import MpsError, read_control_log, read_daemon_pid
from gpulock.deadline import clock_boottime
from gpulock.job.mps import LOGS, PIPE_DIRECTORY, PIPES, mps_folder
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc

DAEMON: Final = "nvidia-cuda-mps-control"
COMM: Final = b"nvidia-cuda-mps"  # as the kernel cuts it
TURN: Final = 0.05  # seconds between two looks
START_SECONDS: Final = 12.0  # from the first program to a server that is there
ASK_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 10.0  # for a look at all processes
MOST_LOOKS: Final = 256  # at the memory of a process
ANSWER_BYTES: Final = 4096
NOBODY_THERE: Final = (0, 0)

T = TypeVar("T")
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
    session: int = 0  # of the daemon

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


def in_background(
    question: Callable[[], T], seconds: float, late: str
) -> Generator[float, None, T]:
    """Return what a thread finds out; raise what it raises, and MpsError where it is late."""
    asked, end = BackgroundCall(question), clock_boottime() + seconds
    while not asked.wait(0.0):
        if clock_boottime() > end:
            raise MpsError(late)
        yield TURN
    return asked.answer()


def learn_groups(site: MpsSite) -> Steps:
    """Find out the groups of the card's user; raise MpsError."""
    late = f"the groups of user {site.uid} cannot be found out in time"
    found = yield from in_background(lambda: find_user_groups(site.uid), ASK_SECONDS, late)
    site.gid, site.groups = found


def start_daemon(site: MpsSite) -> Steps:
    """Start the daemon and its server; `site.control` is it then. Raises MpsError or OSError."""
    late = clock_boottime() + START_SECONDS
    child = site.start_program("-d")
    try:
        since = site.node.proc.start(child.pid)
        while child.poll() is None:
            if clock_boottime() > late:
                raise MpsError(f"{DAEMON} -d does not go into the background")
            yield TURN
    finally:
        end_child(child)
    if child.returncode:
        said = read_control_log(site.folder)
        raise MpsError(f"{DAEMON} -d ended with {child.returncode}{said and f': {said}'}")
    while not (yield from find_daemon(site, since)):
        if clock_boottime() > late:
            raise MpsError(f"{DAEMON} is not there: {read_control_log(site.folder) or 'no log'}")
        yield TURN
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


def find_daemon(site: MpsSite, since: int) -> Generator[float, None, bool]:
    """Find the daemon in the background, begun at `since` or later; return whether it is there.

    Raises MpsError, or OSError where a process hangs that looks like it.
    """

    def look() -> tuple[int, int] | None:
        proc = Proc(site.node.proc.root)
        likely = [*read_daemon_pid(site.folder), *proc.pids()]
        for pid, start in walk_by_pipes(site, proc, likely, since):
            words = proc.read_memory(pid, "cmdline").split(b"\0")
            if b"-d" in words and program_name(proc, pid) == DAEMON:
                return pid, start
        return None

    found = yield from in_background(look, LOOK_SECONDS, f"{DAEMON} cannot be looked for")
    if found:
        site.session = site.node.proc.stat(found[0]).session
        site.control = found
    return found is not None


def walk_by_pipes(
    site: MpsSite, proc: Proc, pids: list[int], since: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (pid, start) of what looks like this MPS: a program's name, and the card's pipes.

    Any process of the user can. It reads memory, so never in gpulockd's main thread. The first
    that hangs ends the look by a TimeoutError, and so do too many.
    """
    wanted, looks = f"{PIPE_DIRECTORY}={site.pipes}".encode(), 0
    for pid in pids:
        try:
            if not proc.read(pid, "comm").startswith(COMM):
                continue
            start = proc.start(pid)
            if proc.status(pid).uids[0] != site.uid or start < since:
                continue
            looks += 1
            if looks > MOST_LOOKS:
                raise TimeoutError(f"too many processes of user {site.uid} look like {DAEMON}")
            if wanted in proc.read_memory(pid, "environ").split(b"\0") and proc.running(pid, start):
                yield pid, start
        except TimeoutError:
            raise
        except (OSError, ValueError):
            continue


def list_mps_processes(site: MpsSite) -> dict[int, int]:
    """Return pid -> start of each process of this MPS: below its daemon, or in the same session.

    Nobody joins a session from outside. A job of the user is elsewhere, whatever its names and
    environment are.
    """
    proc, tree, found = site.node.proc, ProcessTree(site.node.proc), dict[int, int]()
    if site.control == NOBODY_THERE:
        return found
    daemon, runs, session = site.control[0], site.runs(), site.session
    if session == daemon and not runs and is_number_taken(proc, site.control):
        session = 0
    for pid in proc.pids():
        try:
            status = tree.status(pid)
            if status.uids[0] != site.uid or status.kernel:
                continue
            if (session and status.session == session) or (runs and daemon in tree.ancestry(pid)):
                start = proc.start(pid)
                if proc.running(pid, start):
                    found[pid] = start
        except (OSError, ValueError):
            continue
    return found


def is_number_taken(proc: Proc, process: tuple[int, int]) -> bool:
    """Return whether another process has the number of one that is over."""
    try:
        return proc.start(process[0]) != process[1]
    except (OSError, ValueError):
        return False


def kill_mps_processes(site: MpsSite) -> int:
    """Kill every process of this MPS; return how many there were."""
    found = list_mps_processes(site)
    for process in found.items():
        kill_process(site.node.proc, *process)
    return len(found)


def kill_by_pipes(site: MpsSite) -> Steps:
    """Kill what looks like this MPS and may be all that is left of it; raise MpsError or OSError.

    As where gpulockd was killed before it had noted the daemon.
    """

    def kill() -> None:
        proc = Proc(site.node.proc.root)
        for process in walk_by_pipes(site, proc, proc.pids()):
            kill_process(proc, *process)

    yield from in_background(kill, LOOK_SECONDS, "its processes cannot be looked for")


def kill_process(proc: Proc, pid: int, start: int) -> None:
    """Kill a process; one that is gone is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if proc.running(pid, start):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except (OSError, ValueError):
        return
    finally:
        os.close(fd)
