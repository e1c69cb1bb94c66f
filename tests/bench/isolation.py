# SPDX-License-Identifier: Apache-2.0
"""What ISOLATION=cgroup adds to prolog and epilog, on this machine's own cgroups (root).

    python tests/bench/isolation.py [--rounds N]

The kernel lets the first move between cgroups wait for all processors (about 10 ms, and none for
a while after); what the hooks spend in moves is therefore told apart. Exits 0 whether or not the
targets are met, 1 where something cannot be measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench.disturbed import take_locks_away  # noqa: E402
from tests.bench.rounds import Samples, configured, run_rounds  # noqa: E402 (the checkout first)
from tests.labs.common.device_nodes import Service, make_nodes  # noqa: E402
from tests.support.scene import Scene, folder  # noqa: E402
from tests.support.starter import Shepherd  # noqa: E402

GPUS = 8
TARGETS = {"prolog": 3.0, "epilog": 5.0}  # milliseconds beside the moves
CALL = "    os._exit(main(sys.argv, os.environ, CONFIG))"
# What a hook does instead of its last line: its own time, and that of the moves in it.
TIMED = """    from time import perf_counter_ns
    begun, moves = perf_counter_ns(), []
    if {isolated}:
        from gpulock.isolation import tree
        real = tree.move_to_cgroup
        def move(pid, folder):
            before = perf_counter_ns()
            real(pid, folder)
            moves.append(perf_counter_ns() - before)
        tree.move_to_cgroup = move
    code = main(sys.argv, os.environ, CONFIG)
    os.write(2, f"{{perf_counter_ns() - begun}} {{sum(moves)}}".encode())
    os._exit(code)"""


class Pair:
    """Prolog and epilog with one ISOLATION, timed one after the other."""

    def __init__(self, scene: Scene, parent: Shepherd, isolation: str, dev: Path) -> None:
        text = scene.config.read_text()
        more = {"ISOLATION": isolation, "SYS_ROOT": "/sys", "DEV_ROOT": str(dev)}
        kept = [line for line in text.splitlines() if line.partition("=")[0] not in more]
        settings = "\n".join([*kept, *[f"{key}={value}" for key, value in more.items()]]) + "\n"
        self.isolation = isolation
        self._parent = parent
        self._hooks: dict[str, str] = {}
        for name, hook in (("prolog", scene.hooks.prolog), ("epilog", scene.hooks.epilog)):
            path = Path(configured(scene, hook, isolation, settings))
            source = path.read_text()
            if source.count(CALL) != 1:
                raise RuntimeError(f"{hook} does not look as the bench expects")
            timed = TIMED.format(isolated=isolation != "off")
            path.write_text(source.partition(CALL)[0] + timed + "\n")
            self._hooks[name] = str(path)
        self._said = scene.root / "said"
        self._environment = parent.job.folder / "environment"
        self._text = self._environment.read_bytes()

    def run(self, samples: Samples) -> None:
        """Run both; keep the milliseconds without moves, and those of the moves."""
        for name, hook in self._hooks.items():
            argv = [hook, str(self._parent.pid)]
            run = self._parent.run(argv, self._parent.environment(), stderr=str(self._said))
            said = self._said.read_text()
            if run.status != 0 or len(said.split()) != 2:
                raise RuntimeError(f"{name} with {self.isolation} exits {run.status}: {said}")
            whole, moves = (int(word) / 1e6 for word in said.split())
            samples.setdefault(f"{name} {self.isolation}", []).append(whole - moves)
            samples.setdefault(f"{name} {self.isolation} moves", []).append(moves)
        self._environment.write_bytes(self._text)


def measure(root: Path, rounds: int) -> Samples:
    """Return the milliseconds of every row in every round."""
    scene = Scene(root)
    samples: Samples = {}
    dev = root / "dev"
    make_nodes(dev, GPUS)
    with Shepherd(scene.spool(1, 2)) as shepherd:
        service = Service(f"gpulock-bench-{os.getpid()}.service", shepherd.pid)
        try:
            off, on = (Pair(scene, shepherd, each, dev) for each in ("off", "cgroup"))
            acts = [lambda: off.run(samples), lambda: on.run(samples)]
            run_rounds(acts, samples, rounds, 1, lambda: take_locks_away(scene.node()))
        finally:
            service.close()
    return samples


def show(samples: Samples) -> None:
    """Print medians, what isolation adds, and whether that is within the target."""
    middle = {row: statistics.median(values) for row, values in samples.items()}
    for name, target in TARGETS.items():
        off, on = middle[f"{name} off"], middle[f"{name} cgroup"]
        met = "met" if on - off <= target else "MISSED"
        moves = middle[f"{name} cgroup moves"]
        print(
            f"{name}: off {off:.2f} ms, cgroup {on:.2f} ms: adds {on - off:.2f} ms"
            f" (target {target:g}: {met}), and {moves:.2f} ms in the kernel's moves"
        )


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description="what ISOLATION=cgroup adds to the hooks")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    try:
        with folder("bench-isolation") as root:
            show(measure(root, options.rounds))
    except (RuntimeError, OSError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
