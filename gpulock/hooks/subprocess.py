# SPDX-License-Identifier: Apache-2.0
"""Run one program of the scheduler and read its answer, up to a deadline.

Hot, but loaded only when a question cannot be answered on this node. The environment is ours,
standard input is /dev/null, and a child that does not answer is killed: the host it asks may not
answer at all.
"""

from __future__ import annotations

import subprocess

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal

KILL_SECONDS = 1.0  # for a child that was killed: on a file system that hangs it does not end


class SchedulerProgram:
    """A program with its environment; `hint` says what to do when it fails."""

    __slots__ = ("env", "hint", "path")

    def __init__(self, path: str, env: dict[str, str], hint: str) -> None:
        self.path = path
        self.env = env
        self.hint = hint

    def answer(self, arguments: list[str], deadline: Deadline) -> tuple[int, bytes]:
        """Return exit code and output, with standard error in it.

        The code is negative where a signal ended it. Raises Refusal(UNKNOWN) when it does not end
        in time.
        """
        try:
            child = subprocess.Popen(
                [self.path, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as fault:
            raise Refusal(UNKNOWN, f"{self.path}: {fault}", self.hint) from fault
        assert child.stdout is not None
        try:
            output = child.communicate(timeout=max(deadline.left(), 0.0))[0]
        except subprocess.TimeoutExpired as late:
            kill_child(child)
            raise Refusal(UNKNOWN, f"{self.name} did not end in time", self.hint) from late
        finally:
            child.stdout.close()
        return child.returncode, output

    @property
    def name(self) -> str:
        """Return the program's bare name."""
        return self.path.rpartition("/")[2]


def kill_child(child: subprocess.Popen[bytes]) -> None:
    """End the child that did not answer, and reap it unless it hangs in the kernel."""
    child.kill()
    try:
        child.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return
