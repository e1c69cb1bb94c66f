# SPDX-License-Identifier: Apache-2.0
"""The history's chore as a process: the sweep stops it at every system call.

Usage: python -IS history.py LIBRARIES CONFIG. Exits 0 whatever it could not do.
"""

import os
import sys

sys.path[:0] = sys.argv[1].split(":")

from gpulock.daemon.history.writer import HistoryWriter  # noqa: E402 (the library is put on the path first)
from gpulock.daemon.reconcile.reconcile import ReconcileReport  # noqa: E402
from gpulock.node.context import Node  # noqa: E402
from gpulock.node.settings_file import read_settings  # noqa: E402


def say(text: str) -> None:
    """Write a line where the test reads it."""
    os.write(2, text.encode() + b"\n")


def main(config: str) -> int:
    """Write what is over."""
    HistoryWriter(say).run(Node(read_settings(config), "node1"), ReconcileReport([], []), 0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
