# SPDX-License-Identifier: Apache-2.0
"""Measure gpulock on a simulated node: `make bench`. Writes nothing into the tree.

Exits 0 whether or not the targets are met, 1 where something cannot be measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import hooks, table  # noqa: E402 (the checkout is put on the path first)
from tests.bench.scene import Scene, folder  # noqa: E402


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description="how long a claim and a hook take")
    parser.add_argument("--rounds", type=int, default=41, help="rounds of whole processes")
    parser.add_argument("--seed", type=int, default=1, help="of the order within a round")
    options = parser.parse_args()
    try:
        with folder("bench") as root:
            scene = Scene(root)
            samples = hooks.measure(scene, options.rounds, options.seed)
            table.print_hooks(samples, scene.interpreter)
    except (RuntimeError, OSError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
