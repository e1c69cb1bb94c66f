# SPDX-License-Identifier: Apache-2.0
"""The hooks of another commit and of this tree in turns: `make bench-paired BEFORE=HEAD~1`.

Grid Engine's prolog and epilog as whole processes, in milliseconds: both medians, their ratio, and
the quartiles of the ratios of each pair, of which a busy machine disturbs both halves alike. It
ends with 1 where the prolog is slower than LIMIT allows.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.harness import CPU, WAITED, WARM_UP, Samples, Target, count_missed
from tests.bench.hooks import grid_engine, restorer
from tests.support.scene import Scene, folder
from tests.support.starter import Shepherd

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1.02  # times the prolog of before
PROLOG = "prolog"
Round = dict[str, float]  # milliseconds by row


def compare(before: str, rounds: int) -> int:
    """Time both trees in turns, and print what was slower; return the exit code."""
    with tree_of(before) as tree, timing(tree) as old, timing(str(ROOT)) as new:
        pairs = take_turns(old, new, rounds)
    print(f"{before} and this tree in turns, ms, {rounds} rounds")
    print(f"  {'':20}{'before':>9}{'now':>9}{'ratio':>9}{'pairs':>9}{'p25':>9}{'p75':>9}")
    for row in pairs[0][0]:
        print(f"  {row:20}" + "".join(f"{value:9.3f}" for value in compare_row(pairs, row)))
    return 1 if count_missed([prolog_target(pairs)]) else 0


@contextmanager
def tree_of(commit: str) -> Generator[str]:
    """Give the files of a commit, without its tests, in a folder of their own."""
    archive = ["git", "-C", str(ROOT), "archive", commit]
    packed = subprocess.run(archive, stdout=subprocess.PIPE, check=False).stdout
    if not packed:
        raise SystemExit(f"no commit {commit}")
    with tempfile.TemporaryDirectory(prefix="gpulock-bench-") as directory:
        extract = ["tar", "-xC", directory, "--exclude=tests"]
        subprocess.run(extract, input=packed, check=True)
        yield directory


@contextmanager
def timing(tree: str) -> Generator[Callable[[], Round]]:
    """Give what times the hooks of a tree once: this program, with the gpulock of that tree."""
    program = [sys.executable, "-m", "tests.bench.paired", "be"]
    env, pipe = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT}"}, subprocess.PIPE
    with subprocess.Popen(
        program, stdin=pipe, stdout=pipe, text=True, cwd=tree, env=env
    ) as process:
        answers, requests = process.stdout, process.stdin
        assert answers is not None and requests is not None

        def once() -> Round:
            requests.write("\n")
            requests.flush()
            round_: Round = json.loads(answers.readline())
            return round_

        yield once
        requests.close()


def time_rounds() -> int:
    """Time the hooks of the gpulock that is imported, once for each line that comes."""
    samples: Samples = {}
    with folder("paired") as root:
        scene = Scene(root)
        with Shepherd(scene.spool(1, 2)) as shepherd:
            acts, restore = grid_engine(scene, shepherd, samples), restorer(scene, shepherd)
            for _ in sys.stdin:
                samples.clear()
                for act in acts:
                    restore()
                    act()
                print(json.dumps({row: values[0] for row, values in samples.items()}), flush=True)
    return 0


def take_turns(
    old: Callable[[], Round], new: Callable[[], Round], rounds: int
) -> list[tuple[Round, Round]]:
    """Return what both took in each round; which one is first is drawn."""
    pairs: list[tuple[Round, Round]] = []
    for _ in range(rounds + WARM_UP):
        if random.random() < 0.5:
            before = old()
            pairs.append((before, new()))
        else:
            now = new()
            pairs.append((old(), now))
    return pairs[WARM_UP:]


def prolog_target(pairs: Sequence[tuple[Round, Round]]) -> Target:
    """Return the target of the prolog: by processor time where it mostly waited for a processor."""
    took, worked = (
        statistics.median(now[row] for _, now in pairs) for row in (PROLOG, PROLOG + CPU)
    )
    row = PROLOG + CPU if took > WAITED * worked else PROLOG
    return Target(f"{row}, median of the pairs", compare_row(pairs, row)[3], LIMIT)


def compare_row(pairs: Sequence[tuple[Round, Round]], row: str) -> tuple[float, ...]:
    """Return both medians, their ratio, and the median and quartiles of the pairs' ratios."""
    before = statistics.median(one[row] for one, _ in pairs)
    now = statistics.median(one[row] for _, one in pairs)
    low, middle, high = statistics.quantiles([b[row] / a[row] for a, b in pairs], n=4)
    return before, now, now / before, middle, low, high


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["be"]:
        sys.exit(time_rounds())
    if len(words) != len(("commit", "rounds")):
        sys.exit("usage: make bench-paired BEFORE=COMMIT [ROUNDS=400]")
    sys.exit(compare(words[0], int(words[1])))
