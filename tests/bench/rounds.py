# SPDX-License-Identifier: Apache-2.0
"""Whole processes in rounds of shuffled order, and the variants of a hook that are timed.

Whatever else this machine does then falls on all rows alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.bench.disturbed import undisturbed
from tests.support.scene import Scene, linked_proc
from tests.support.starter import Starter

CPU = " cpu"  # processor time: other work on the machine disturbs it less
WARM_UP = 3  # rounds that are not counted
CALL = re.compile(r"^    (.*)\((main\(.*\))\).*$", re.MULTILINE)  # the last line of a hook
IMPORTS_ONLY = r"    \1(0)"
TIMED = r"""    from time import perf_counter_ns
    begun = perf_counter_ns()
    code = \2
    os.write(2, f"{perf_counter_ns() - begun}".encode())
    \1(code)"""
PROFILED = r"""    import json
    calls = set()
    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and "/lib/gpulock/" in code.co_filename and code.co_name[0] != "<":
            calls.add((code.co_filename, f"{code.co_name}:{code.co_firstlineno}"))
    sys.setprofile(note)
    code = \2
    sys.setprofile(None)
    os.write(2, json.dumps(sorted(calls)).encode())
    \1(code)"""

Samples = dict[str, list[float]]
Act = Callable[[], None]


class Recorder:
    """Start programs from one parent and keep their milliseconds by row."""

    def __init__(self, scene: Scene, parent: Starter, samples: Samples) -> None:
        self.scene = scene
        self.samples = samples
        self._parent = parent
        self._timing = scene.root / f"timing.{parent.pid}"
        self._timing.touch()
        self._timing.chmod(0o666)  # a TaskProlog is the user's

    def timed(self, row: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Run one program to its end, and keep how long it took."""
        run = self._parent.run(argv, env)
        if run.status != 0:
            raise RuntimeError(f"{row} exits {run.status}")
        self.add(row, run.nanoseconds)
        self.add(f"{row}{CPU}", run.cpu_nanoseconds)

    def timed_inside(self, row: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Run a hook that was made by `timing`, and keep how long its main() took."""
        run = self._parent.run(argv, env, stderr=str(self._timing))
        if run.status != 0:
            raise RuntimeError(f"{row} exits {run.status}: {self._timing.read_text()}")
        self.add(row, float(self._timing.read_text()))

    def add(self, row: str, nanoseconds: float) -> None:
        """Keep one measurement."""
        self.samples.setdefault(row, []).append(nanoseconds / 1e6)

    def held(self, count: int, by: str) -> None:
        """Raise RuntimeError unless so many devices are locked."""
        locks = list(Path(self.scene.simulated.lock_dir, "locks").iterdir())
        if len(locks) != count:
            raise RuntimeError(f"after {by} {len(locks)} devices are locked, not {count}")


def run_rounds(acts: Sequence[Act], samples: Samples, rounds: int, seed: int, restore: Act) -> None:
    """Do every act once a round, each round in another order; `restore` clears up a failed one."""
    order, mixed = random.Random(seed), list(acts)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            samples.clear()
        order.shuffle(mixed)
        for act in mixed:
            kept = {row: len(found) for row, found in samples.items()}

            def undo(before: Mapping[str, int] = kept) -> None:
                for row, found in samples.items():
                    del found[before.get(row, 0) :]
                restore()

            undisturbed(act, undo)


def importing(hook: Path) -> str:
    """Return a variant of a hook that imports what the hook imports, and stops there."""
    return _variant(hook, "imports", CALL.subn(IMPORTS_ONLY, hook.read_text()))


def timing(hook: Path) -> str:
    """Return a variant of a hook that says on stderr how many nanoseconds its main() took."""
    return _variant(hook, "timed", CALL.subn(TIMED, hook.read_text()))


def profiling(hook: Path) -> str:
    """Return a variant of a hook that says on stderr, as JSON, which of our functions it called."""
    return _variant(hook, "profiled", CALL.subn(PROFILED, hook.read_text()))


def configured(scene: Scene, hook: Path, name: str, settings: str) -> str:
    """Return a variant of a hook that has settings of its own, in NAME.conf.

    And a STATE_DIR of its own, with the same notes in it: there root keeps a copy of the settings
    obeyed last, and hooks that take turns would write it anew each time.
    """
    state, own = scene.root / "state", scene.root / f"state-{name}"
    if not own.is_dir():
        own.mkdir()
        for folder in ("runs", "owed", "quarantine", "reserves"):
            (state / folder).mkdir(parents=True, exist_ok=True)
            (own / folder).symlink_to(state / folder)
    settings = settings.replace(f"STATE_DIR={state}\n", f"STATE_DIR={own}\n")
    config = scene.config.with_name(f"{name}.conf")
    config.write_text(settings)
    text = hook.read_text()
    known = repr(str(scene.config))
    return _variant(hook, name, (text.replace(known, repr(str(config))), text.count(known)))


def alone(scene: Scene, hook: Path, pid: int) -> str:
    """Return a variant of a hook that sees one process, instead of all of this machine."""
    name = f"alone-{pid}"
    proc = scene.root / f"proc-{name}"
    if not proc.is_dir():
        linked_proc(proc, (pid,))
    return configured(scene, hook, name, f"{scene.config.read_text()}PROC_ROOT={proc}\n")


def _variant(hook: Path, name: str, changed: tuple[str, int]) -> str:
    text, found = changed
    if found != 1:
        raise RuntimeError(f"{hook} does not look as the bench expects")
    path = hook.with_name(f"{hook.name}-{name}")
    path.write_text(text)
    path.chmod(0o755)
    return str(path)
