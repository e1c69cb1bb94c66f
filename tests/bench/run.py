# SPDX-License-Identifier: Apache-2.0
"""Measure gpulock on a simulated node: `make bench`. Writes nothing into the tree.

Exits 1 where a target is missed or something cannot be measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import daemon, given_back, hooks, inprocess, looks, status, table  # noqa: E402 (the checkout is put on the path first)
from tests.bench.disturbed import print_disturbances  # noqa: E402
from tests.support.scene import Scene, folder  # noqa: E402


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description="how long a claim and a hook take")
    parser.add_argument("--rounds", type=int, default=41, help="rounds of whole processes")
    parser.add_argument("--seed", type=int, default=1, help="of the order within a round")
    parser.add_argument("--claims", type=int, default=2000, help="claims within a process")
    parser.add_argument("--crowd", type=int, default=3000, help="processes in the large scan")
    parser.add_argument("--most", type=int, default=30000, help="processes in the largest look")
    options = parser.parse_args()
    begun = time.monotonic()
    try:
        with folder("bench") as root:
            missed = measure(root, options)
            print_disturbances()
    except (RuntimeError, OSError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 1
    print(f"\n{time.monotonic() - begun:.0f} s")
    return 1 if missed else 0


def measure(root: Path, options: argparse.Namespace) -> int:
    """Measure everything on one node below `root`; return how many targets were missed."""
    scene = Scene(root)
    slurm = Scene(root / "slurm")
    samples = hooks.measure(scene, slurm, options.rounds, options.seed)
    table.print_hooks(samples, scene.interpreter)
    print(
        f"  this node has {inprocess.process_count()} processes: an epilog looks at their owners,"
    )
    print("  one that is alone sees itself only")
    claims = inprocess.claims(root / "claims", options.claims)
    table.print_inside("within a process, /proc shows one process", claims)
    whole, locks = (
        table.quantile(claims[n], 0.5) for n in ("claim + release", inprocess.BARE_LOCKS)
    )
    print(
        f"  {whole / locks:.1f} x the calls of the locks alone, which the target first counted: the"
    )
    print("  driver's files and the look at processes take their time in any case")
    node = scene.node()
    targets = looks.measure(root, node, (options.crowd, options.most))
    over = status.over_interpreter(scene, options.rounds)
    targets += [*table.hook_targets(samples), *table.claim_targets(claims, inprocess.BARE)]
    targets += daemon.measure(root, options.crowd)
    targets += given_back.measure(root)
    return table.print_targets([*targets, ("gpulock status - interpreter, ms", over, 60.0)])


if __name__ == "__main__":
    sys.exit(main())
