# SPDX-License-Identifier: Apache-2.0
"""An installer of a real scheduler, killed before or after one of its changes.

The calls within a change are killed on recorded schedulers, by the installers' `test_killed.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

# Its first argument is the point: twice the number of the change, and one more for after it.
KILLED_ITEMS: Final = """
import os, signal, sys
from itertools import count
from gpulock.cli import main
from gpulock.install import items
point, numbers, made = int(sys.argv.pop(1)), count(), items._change
def reach(number):
    if number == point:
        os.kill(os.getpid(), signal.SIGKILL)
def apply(*change):
    number = next(numbers)
    reach(2 * number)
    made(*change)
    reach(2 * number + 1)
items._change = apply
main()
"""


def points_of_changes(dry_run: str) -> Sequence[int]:
    """Return the points to kill at: a sample of what a dry run showed, in a soak all of them."""
    found = re.search(r"(\d+) changes would be made", dry_run)
    assert found, dry_run
    number = int(found[1])
    whole = os.environ.get("GPULOCK_SOAK") == "1"
    return range(2 * number) if whole else (number, 2 * number - 2, 2 * number - 1)
