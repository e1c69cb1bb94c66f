# SPDX-License-Identifier: Apache-2.0
"""One reconcile as a process, with the exit codes of `gpulock reap` and without its CLI's imports.

Usage: python -IS reap.py LIBRARY CONFIG. The sweep stops it at every system call.
"""

import os
import sys

sys.path[:0] = [sys.argv[1]]

from gpulock.daemon.reconcile.reconcile import reconcile_locks  # noqa: E402
from gpulock.deadline import Deadline  # noqa: E402
from gpulock.errors import BROKEN, Refusal  # noqa: E402
from gpulock.node.context import Node  # noqa: E402
from gpulock.node.settings_file import read_settings  # noqa: E402
from gpulock.schedulers.liveness import make_liveness_judge  # noqa: E402 (the library is put on the path first)

DONE, REFUSED, NODE_BROKEN = 0, 1, 3


def main(config: str) -> int:
    """Reconcile once; return the exit code."""
    try:
        node = Node(read_settings(config))
        reconcile_locks(node, make_liveness_judge(node), Deadline(20))
    except Refusal as refusal:
        os.write(2, refusal.sentence("reap").encode())
        return NODE_BROKEN if refusal.kind == BROKEN else REFUSED
    except OSError as fault:
        os.write(2, f"reap: {fault}".encode())
        return NODE_BROKEN
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
