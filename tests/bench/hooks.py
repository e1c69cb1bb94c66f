# SPDX-License-Identifier: Apache-2.0
"""How long the hooks take as whole processes, next to a bare interpreter and to a shell prolog.

All rows are started by one and the same parent, in rounds of shuffled order, so that whatever
else this machine does falls on all of them alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from gpulock.simulate.execd import SpooledJob
from tests.bench.scene import Scene, linked_proc
from tests.bench.shepherd import Parent

PEER = Path(__file__).with_name("peer.sh")
PEER_EPILOG = Path(__file__).with_name("peer_epilog.sh")
QSTAT_ANSWER = "job_number:  1\nowner:  user\nhard resource_list:         gpu=2\n"
CPU = " cpu"  # processor time: other work on the machine disturbs it less
WARM_UP = 3  # rounds that are not counted
CALL = re.compile(r"^    (.*)\((main\(.*\))\).*$", re.MULTILINE)  # the last line of a hook
IMPORTS_ONLY = r"    \1(0)"
TIMED = r"""    from time import perf_counter_ns
    begun = perf_counter_ns()
    code = \2
    os.write(2, f"{perf_counter_ns() - begun}".encode())
    \1(code)"""

Samples = dict[str, list[float]]


class HookBench:
    """The acts of a round; every one leaves the node as it found it."""

    def __init__(self, scene: Scene, job: SpooledJob, parent: Parent) -> None:
        self.samples: Samples = {}
        self._scene = scene
        self._parent = parent
        self._environment = job.folder / "environment"
        self._text = self._environment.read_bytes()
        self._timing = scene.root / "timing"
        self._peer_locks = scene.root / "peer"
        self._peer_locks.mkdir()
        self._answer = scene.root / "qstat.txt"
        self._answer.write_text(QSTAT_ANSWER)
        hooks = scene.hooks
        self._prolog, self._epilog = str(hooks.prolog), str(hooks.epilog)
        self._launch = str(hooks.launch)
        self._imports = [self._variant(path, IMPORTS_ONLY) for path in (hooks.prolog, hooks.epilog)]
        self._epilog_alone = self._with_proc(scene, hooks.epilog, parent.pid)
        self._timed = [self._variant(path, TIMED) for path in (hooks.prolog, hooks.epilog)]

    def acts(self) -> list[Callable[[], None]]:
        """Return what a round does, in any order."""
        return [
            self.floor,
            self.bare,
            self.imports,
            self.direct,
            self.launched,
            self.alone,
            self.peer,
            self.timed,
        ]

    def floor(self) -> None:
        """Start the hooks' interpreter and do nothing."""
        self._run("floor", self._scene.interpreter, "-IS", "-c", "pass")

    def bare(self) -> None:
        """Start the smallest program."""
        self._run("true", "/bin/true")

    def imports(self) -> None:
        """Import what the hooks import, and stop there."""
        for name, hook in zip(("prolog", "epilog"), self._imports, strict=True):
            self._run(f"{name} imports", hook, str(self._parent.pid))

    def direct(self) -> None:
        """Claim and release without the launcher."""
        self._pair("", [self._prolog], [self._epilog], str(self._parent.pid))

    def alone(self) -> None:
        """Release where the last guard has one process to look at, instead of all."""
        pid = str(self._parent.pid)
        self._pair(", alone", [self._prolog], [self._epilog_alone], pid)

    def launched(self) -> None:
        """Claim and release as the queue is configured."""
        self._pair("+launch", [self._launch, self._prolog], [self._launch, self._epilog])

    def peer(self) -> None:
        """Claim and release in shell."""
        gpus = str(len(self._scene.simulated.machine.gpus))
        self._run("shell prolog", str(PEER), str(self._peer_locks), str(self._answer), gpus)
        if len(list(self._peer_locks.iterdir())) != 2:
            raise RuntimeError("the shell prolog did not lock 2 devices")
        self._run("shell epilog", str(PEER_EPILOG), str(self._peer_locks))
        self._restore()

    def timed(self) -> None:
        """Time main() inside the process."""
        for name, hook in zip(("prolog", "epilog"), self._timed, strict=True):
            pid = str(self._parent.pid)
            run = self._parent.run([hook, pid], stderr=str(self._timing))
            if run.status != 0:
                raise RuntimeError(f"{name} exits {run.status}: {self._timing.read_text()}")
            self._add(f"{name} main()", float(self._timing.read_text()))
        self._restore()

    def _pair(self, suffix: str, prolog: list[str], epilog: list[str], *more: str) -> None:
        locks = Path(self._scene.simulated.lock_dir, "locks")
        self._run(f"prolog{suffix}", *prolog, *more)
        if len(list(locks.iterdir())) != 2:
            raise RuntimeError("the prolog did not lock 2 devices")
        self._run(f"epilog{suffix}", *epilog, *more)
        if list(locks.iterdir()):
            raise RuntimeError("the epilog did not release the devices")
        self._restore()

    def _run(self, name: str, *argv: str) -> None:
        run = self._parent.run(argv)
        if run.status != 0:
            raise RuntimeError(f"{name} exits {run.status}")
        self._add(name, run.nanoseconds)
        self._add(f"{name}{CPU}", run.cpu_nanoseconds)

    def _add(self, name: str, nanoseconds: float) -> None:
        self.samples.setdefault(name, []).append(nanoseconds / 1e6)

    def _restore(self) -> None:
        self._environment.write_bytes(self._text)

    def _with_proc(self, scene: Scene, hook: Path, pid: int) -> str:
        proc = linked_proc(scene.root / "proc-alone", (pid,))
        config = scene.config.with_name("alone.conf")
        config.write_text(f"{scene.config.read_text()}PROC_ROOT={proc}\n")
        text = hook.read_text().replace(repr(str(scene.config)), repr(str(config)))
        path = hook.with_name(f"{hook.name}-alone")
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def _variant(self, hook: Path, ending: str) -> str:
        text = hook.read_text()
        changed, found = CALL.subn(ending, text)
        if found != 1:
            raise RuntimeError(f"{hook} does not end as the bench expects")
        path = hook.with_name(f"{hook.name}-{len(ending)}")
        path.write_text(changed)
        path.chmod(0o755)
        return str(path)


def measure(scene: Scene, rounds: int, seed: int) -> Samples:
    """Return the milliseconds of every row in every round."""
    job = scene.spool(1, 2)
    order = random.Random(seed)
    with Parent(job) as parent:
        bench = HookBench(scene, job, parent)
        acts = bench.acts()
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                bench.samples.clear()
            order.shuffle(acts)
            for act in acts:
                act()
    return bench.samples
