# SPDX-License-Identifier: Apache-2.0
"""The hooks of another commit and of this tree in turns: `make bench-paired BEFORE=HEAD~1`.

Grid Engine's prolog and epilog as whole processes, in milliseconds: both medians, their ratio, and
the quartiles of the ratios of each pair, of which a busy machine disturbs both halves alike. It
ends with 1 where the prolog is slower than LIMIT allows.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 5  # rounds that are not counted
LIMIT = 1.02  # times the prolog of before
CPU = "prolog cpu"
Round = dict[str, float]  # milliseconds by row


def main(arguments: list[str]) -> int:
    """Compare two trees, or `be TREE`: the program that times one of them, a round a line."""
    if arguments[:1] == ["be"]:
        return time_rounds(arguments[1])
    if len(arguments) != len(("commit", "rounds")):
        print("usage: make bench-paired BEFORE=COMMIT [ROUNDS=400]", file=sys.stderr)
        return 2
    before, rounds = arguments
    with tree_of(before) as tree, timing(tree) as old, timing(str(ROOT)) as new:
        pairs = list(take_turns(old, new, int(rounds)))
    print(f"{before} and this tree in turns, ms, {rounds} rounds")
    print(f"  {'':20}{'before':>9}{'now':>9}{'ratio':>9}{'pairs':>9}{'p25':>9}{'p75':>9}")
    for row in pairs[0][0]:
        print(f"  {row:20}" + "".join(f"{value:9.3f}" for value in compare_row(pairs, row)))
    sys.path[0] = str(ROOT)
    return judge_pairs(pairs)


@contextmanager
def tree_of(commit: str) -> Generator[str]:
    """Give the files of a commit in a folder of their own."""
    archive = ["git", "-C", str(ROOT), "archive", commit]
    packed = subprocess.run(archive, stdout=subprocess.PIPE, check=False).stdout
    if not packed:
        raise SystemExit(f"no commit {commit}")
    with tempfile.TemporaryDirectory(prefix="gpulock-bench-") as folder:
        subprocess.run(["tar", "-xC", folder], input=packed, check=True)
        yield folder


@contextmanager
def timing(tree: str) -> Generator[Callable[[], Round]]:
    """Give what times the hooks of a tree once."""
    program = [sys.executable, __file__, "be", tree]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, cwd=tree) as process:
        told, asked = process.stdout, process.stdin
        assert told is not None and asked is not None

        def once() -> Round:
            asked.write("\n")
            asked.flush()
            found: Round = json.loads(told.readline())
            return found

        yield once
        asked.close()


def time_rounds(tree: str) -> int:
    """Time the hooks of a tree once for each line that comes."""
    sys.path[0] = tree
    from tests.bench.hooks import SgeBench  # of that tree
    from tests.support.scene import Scene, folder
    from tests.support.starter import Shepherd

    samples: dict[str, list[float]] = {}
    with folder("paired") as root:
        scene = Scene(root)
        with Shepherd(scene.spool(1, 2)) as shepherd:
            bench = SgeBench(scene, shepherd, samples)
            for _ in sys.stdin:
                samples.clear()
                bench.direct()
                bench.launched()
                print(json.dumps({row: values[0] for row, values in samples.items()}), flush=True)
    return 0


def take_turns(
    old: Callable[[], Round], new: Callable[[], Round], rounds: int
) -> Iterator[tuple[Round, Round]]:
    """Yield what both took in each round; which one is first is drawn."""
    for number in range(rounds + WARM_UP):
        if random.random() < 0.5:
            before = old()
            now = new()
        else:
            now = new()
            before = old()
        if number >= WARM_UP:
            yield before, now


def judge_pairs(pairs: list[tuple[Round, Round]]) -> int:
    """Print whether the prolog is as fast as before; return the exit code.

    By processor time where the prolog mostly waited for a processor.
    """
    from tests.bench.table import WAITED, print_targets

    took, worked = (statistics.median(now[row] for _, now in pairs) for row in ("prolog", CPU))
    row = CPU if took > WAITED * worked else "prolog"
    target = f"{row}, median of the pairs", compare_row(pairs, row)[3], LIMIT
    return 1 if print_targets([target]) else 0


def compare_row(pairs: list[tuple[Round, Round]], row: str) -> tuple[float, ...]:
    """Return both medians, their ratio, and the median and quartiles of the pairs' ratios."""
    before = statistics.median(one[row] for one, _ in pairs)
    now = statistics.median(one[row] for _, one in pairs)
    low, middle, high = statistics.quantiles([b[row] / a[row] for a, b in pairs], n=4)
    return before, now, now / before, middle, low, high


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
