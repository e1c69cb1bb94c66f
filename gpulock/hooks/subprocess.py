# SPDX-License-Identifier: Apache-2.0
"""Run one program of the scheduler and read its answer, up to a deadline.

Hot, but loaded only when a question cannot be answered on this node. The environment is ours,
standard input is /dev/null, and a child that does not answer is killed: the host it asks may not
answer at all.
"""

import errno
import os
import select
import time
from _signal import SIGKILL  # the C module: its Python face costs 4 ms

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, one_line, shorten

POLL_SECONDS = 0.002
KILL_SECONDS = 1.0  # for a child that was killed: on a file system that hangs it does not end
ANSWER_LIMIT, PIECE = 1 << 24, 1 << 16  # bytes, in all and at once
COMMAND_BYTES = 100  # of a command in a refusal


class SchedulerProgram:
    """A program with its environment; `hint` says what to do when it fails."""

    def __init__(self, path: str, env: dict[str, str], hint: str) -> None:
        self.path = path
        self.env = env
        self.hint = hint

    def answer(self, arguments: list[str], deadline: Deadline) -> tuple[int, bytes]:
        """Return exit code and output, with standard error in it.

        The code is negative where a signal ended it. Raises Refusal(UNKNOWN) when it does not end
        in time.
        """
        read_end, write_end = os.pipe()
        try:
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, write_end, 1),
                (os.POSIX_SPAWN_DUP2, write_end, 2),
            ]
            argv = [self.path, *arguments]
            pid = os.posix_spawn(self.path, argv, self.env, file_actions=actions)
        except OSError as fault:
            os.close(read_end)
            raise Refusal(UNKNOWN, f"{self.path}: {fault}", self.hint) from fault
        finally:
            os.close(write_end)
        status: "int | None" = None
        try:
            output = self._collect(read_end, deadline)
            status = wait_for_child(pid, deadline)
        finally:
            os.close(read_end)
            if status is None:
                kill_child(pid)
        if status is None:
            raise Refusal(UNKNOWN, f"{self.name} did not end in time", self.hint)
        return os.waitstatus_to_exitcode(status), output

    def read(self, arguments: list[str], deadline: Deadline) -> str:
        """Return what it prints; raise Refusal(UNKNOWN), with its last words where it failed."""
        code, output = self.answer(arguments, deadline)
        said = output.decode("utf-8", "replace").strip()
        if code:
            command = shorten(" ".join([self.name, *arguments]), COMMAND_BYTES)
            why = f"{command} ended with {code}: {one_line(said)[-200:]}"
            raise Refusal(UNKNOWN, why, self.hint)
        return said

    @property
    def name(self) -> str:
        """Return the program's bare name."""
        return self.path.rpartition("/")[2]

    def _collect(self, fd: int, deadline: Deadline) -> bytes:
        """Read to the end of a pipe; raise Refusal at the deadline or for an endless answer."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        output = b""
        while True:
            if not poll.poll(max(1, int(deadline.left() * 1000))):
                raise Refusal(UNKNOWN, f"{self.name} did not answer in time", self.hint)
            if deadline.left() <= 0:
                raise Refusal(UNKNOWN, f"{self.name} did not end in time", self.hint)
            data = os.read(fd, PIECE)
            if not data:
                return output
            output += data
            if len(output) > ANSWER_LIMIT:
                raise Refusal(UNKNOWN, f"{self.name}'s answer has no end", self.hint)


def wait_for_child(pid: int, deadline: Deadline) -> "int | None":
    """Wait for a child that closed its output; return its status, None at the deadline.

    Polled: not every kernel that runs this has pidfd_open.
    """
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if deadline.left() <= 0:
            return None
        time.sleep(POLL_SECONDS)


def kill_child(pid: int) -> None:
    """End the child that did not answer, and reap it unless it hangs in the kernel."""
    try:
        os.kill(pid, SIGKILL)
        wait_for_child(pid, Deadline(KILL_SECONDS))
    except OSError as fault:
        if fault.errno not in (errno.ESRCH, errno.ECHILD):
            raise
