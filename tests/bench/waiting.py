# SPDX-License-Identifier: Apache-2.0
"""What 200 calls that wait on a workstation cost: `make bench-waiting`, as root.

Usage: python -m tests.bench.waiting.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench.harness import Target, run_bench
from tests.labs.daemon.daemon_users import COST
from tests.labs.daemon.test_daemon_users import told

SECONDS = 30


def measure(_: Path) -> list[Target]:
    """Return the memory of a call, and what gpulockd takes of a core meanwhile."""
    memory, share = told("hall", SECONDS).partition(COST)[2].split()[:2]
    return [
        Target("each of 200 calls that wait, PSS, MiB", int(memory) / 1024, 3.0),
        Target("gpulockd meanwhile, % of a core", 100 * float(share), 1.0),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("waiting", measure))
