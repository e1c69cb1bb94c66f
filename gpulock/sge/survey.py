# SPDX-License-Identifier: Apache-2.0
"""Which complexes the hosts of a cluster have, for the verifier: asked beside it, never waited for.

Hot folder, loaded by the verifier where SGE_COMPLEXES has kinds. A child process asks qmaster. Its
answer counts for a while, and only a whole one does: what is not known refuses nobody.
"""

import os
import select

from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.sge.qstat import make_sge_client

AGAIN, COUNTS = 300.0, 600.0  # seconds: until the next question, and how long an answer counts
SURVEY_SECONDS = 60.0  # for all of qmaster's answers
WHOLE = b"whole\n"  # ends an answer
LONGEST_ANSWER = 1 << 16  # bytes, what a pipe takes


class ClusterSurvey:
    """What the hosts have, and the child that asks for it."""

    __slots__ = ("_asked", "_fd", "_found", "_known", "_pid", "_settings", "_text")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked = self._known = -COUNTS
        self._pid = self._fd = -1
        self._text = b""
        self._found: dict[str, int] = {}

    def amounts(self) -> dict[str, int]:
        """Return how many one host has at most, by complex; nothing where that is not known."""
        now = clock_boottime()
        self._collect()
        if not self.is_asking() and now - self._asked >= AGAIN:
            self._asked = now
            try:
                self._ask()
            except OSError:
                pass  # it is asked again later
        return self._found if now - self._known < COUNTS else {}

    def is_asking(self) -> bool:
        """Return whether a child is at it."""
        return self._pid >= 0

    def _ask(self) -> None:
        self._fd, end = os.pipe2(os.O_CLOEXEC)
        self._text = b""
        try:
            self._pid = os.fork()
        finally:
            if self._pid:  # the parent, or nobody
                os.close(end)
        if self._pid:
            return
        try:  # the child; qmaster's pipes are not for it
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            found = query_host_amounts(self._settings, Deadline(SURVEY_SECONDS))
            lines = "".join([f"{name} {amount}\n" for name, amount in found.items()])
            os.write(end, lines.encode()[:LONGEST_ANSWER] + WHOLE)
        except (Refusal, OSError, ValueError):
            pass  # no answer refuses nobody
        finally:
            os._exit(0)

    def _collect(self) -> None:
        """Take what the child has written; at its end it is what the hosts have."""
        while self._fd >= 0 and select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, LONGEST_ANSWER)
            self._text += data
            if data:
                continue
            os.close(self._fd)
            self._fd = -1
            if self._text.endswith(WHOLE):
                self._found = parse_survey(self._text[: -len(WHOLE)].decode())
                self._known = self._asked
        if self._fd < 0 <= self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = -1


def query_host_amounts(settings: Settings, deadline: Deadline) -> dict[str, int]:
    """Return how many one host or queue has at most of each GPU complex; raise Refusal."""
    qconf = make_sge_client(settings, "qconf")
    qconf.env["SGE_SINGLE_LINE"] = "1"
    found: dict[str, int] = {}
    for names, show in (("-sel", "-se"), ("-sql", "-sq")):
        objects = qconf.output([names], deadline).decode("utf-8", "replace").split()
        for name in [*objects, "global"] if show == "-se" else objects:
            text = qconf.output([show, name], deadline).decode("utf-8", "replace")
            for complex_name, amount in parse_amounts(text).items():
                if complex_name in settings.sge_complexes:
                    found[complex_name] = max(amount, found.get(complex_name, 0))
    return found


def parse_amounts(text: str) -> dict[str, int]:
    """Return the amount of each complex that a host or queue has, by what `qconf` shows; pure.

    What the load sensor reports counts as well. An amount that is no number counts as one.
    """
    found: dict[str, int] = {}
    for line in text.replace("\\\n", " ").split("\n"):
        key, _, value = line.partition(" ")
        if key not in ("complex_values", "load_values"):
            continue
        for item in value.replace("[", ",").replace("]", ",").split(","):
            name, equals, amount = item.rpartition("=")
            name = name.rpartition("=")[2].strip()
            if not equals or not name:
                continue
            number = amount.partition("(")[0].strip()
            try:
                count = int(float(number))
            except (ValueError, OverflowError):
                count = 1
            found[name] = max(count, found.get(name, 0))
    return found


def parse_survey(text: str) -> dict[str, int]:
    """Return the amounts in what the child wrote."""
    pairs = [line.split(" ") for line in text.split("\n") if line]
    return {pair[0]: int(pair[1]) for pair in pairs}
