# SPDX-License-Identifier: Apache-2.0
"""A shepherd is root alone while it writes its trace: no hook takes that for a broken node.

strace holds the shepherd up at the lines that it writes just after it started a hook. A first job
shows which of its calls these are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.install import INSTALLATION
from tests.labs.sge.jobs import held, on, said, start_shepherds, stopped_queues
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
LINES, MILLISECONDS = 3, 700  # of the trace after a hook's fork; how long each of them takes
FORKS = ("clone", "clone3", "fork", "vfork")
BECOMES_ROOT = "setresuid(-1, 0, -1)"
# All uids of a shepherd that execd starts itself are 0; behind a shepherd_cmd only the real one is,
# and the saved one stays the admin user's. It is the process that execd started (`-D`).
TRACED = """#!/bin/sh -p
exec setpriv --reuid=0 -- strace -D -q -o {log} -e trace=setresuid,{forks} {inject} \\
    {shepherd} "$@"
"""


class TracedShepherds:
    """The shepherds of a lab under strace; one job at a time."""

    def __init__(self, gpus: Gpulock) -> None:
        self._gpus = gpus
        self._log = gpus.sge.lab / "shepherd.strace"
        self.path = gpus.sge.lab / "traced/sge_shepherd"
        self.path.parent.mkdir(exist_ok=True)
        self.said = ""

    def run(self, inject: str = "") -> list[str]:
        """Run a job; return the calls of its shepherd."""
        sge = self._gpus.sge
        words = {"log": self._log, "forks": ",".join(FORKS), "shepherd": INSTALLATION.shepherd}
        self.path.write_text(TRACED.format(**words, inject=inject))
        self.path.chmod(0o755)
        self._log.unlink(missing_ok=True)
        job = sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin="echo ran\n")
        failed = sge.acct(job)["failed"]
        wait_until(lambda: "+++ exited" in self._log.read_text(), why="its shepherd to end")
        assert failed == "0", said(self._gpus, job)
        assert stopped_queues(self._gpus) == {}, said(self._gpus, job)
        assert held(self._gpus, NODE, job) == [], said(self._gpus, job)
        self.said = said(self._gpus, job)
        return self._log.read_text().splitlines()


def hold_up_after(calls: list[str], fork: int) -> str:
    """Return strace's words for the lines that a shepherd writes after one of its forks."""
    forks = [at for at, call in enumerate(calls) if call.split("(")[0] in FORKS]
    assert forks, calls
    uids = [at for at, call in enumerate(calls) if call.startswith("setresuid(")]
    first = next(n for n, at in enumerate(uids, 1) if at > forks[fork])
    assert calls[uids[first - 1]].startswith(BECOMES_ROOT), calls
    last = first + 2 * (LINES - 1)  # each second call gives the right back
    return f"-e inject=setresuid:delay_exit={MILLISECONDS}ms:when={first}..{last}+2"


@pytest.fixture
def traced(gpus: Gpulock) -> Iterator[TracedShepherds]:
    """Let every execd start its shepherds under strace, without gpulock's launcher."""
    shepherds = TracedShepherds(gpus)
    start_shepherds(gpus.sge, str(shepherds.path))
    yield shepherds
    start_shepherds(gpus.sge, "none")


@pytest.mark.parametrize("fork", [0, -1], ids=["prolog", "epilog"])
def test_a_hook_waits_for_a_shepherd_that_writes_its_trace(
    traced: TracedShepherds, fork: int
) -> None:
    """Else the prolog stopped a healthy queue, and the epilog left its lock behind."""
    inject = hold_up_after(traced.run(), fork)

    calls = traced.run(inject)

    assert len([call for call in calls if "(DELAYED)" in call]) == LINES, calls
    assert traced.said == "ran\n"
