# SPDX-License-Identifier: Apache-2.0
"""One round of gpulockd as a process: reconcile, and all the chores that it has.

Usage: python -IS round.py LIBRARIES CONFIG. The sweep stops it at every system call.
"""

import os
import sys

sys.path[:0] = sys.argv[1].split(":")

from gpulock.daemon.app import make_daemon_chores  # noqa: E402 (the library is put on the path first)
from gpulock.daemon.core.instance_lock import AlreadyRunningError  # noqa: E402
from gpulock.daemon.core.journal import DaemonJournal  # noqa: E402
from gpulock.daemon.reconcile.driver import DaemonNode  # noqa: E402
from gpulock.daemon.rounds import Rounds  # noqa: E402
from gpulock.deadline import clock_boottime  # noqa: E402
from gpulock.errors import Refusal  # noqa: E402
from gpulock.node.settings_file import read_settings  # noqa: E402

DONE, REFUSED, NODE_BROKEN = 0, 1, 3


def main(config: str) -> int:
    """Go round once; return the exit code of `gpulock reap` in the same case."""
    journal = DaemonJournal(quiet=True)
    try:
        rounds = Rounds(DaemonNode(read_settings(config)), journal, make_daemon_chores(journal))
        return DONE if rounds.run_round(clock_boottime()) is not None else NODE_BROKEN
    except AlreadyRunningError:
        return REFUSED
    except Refusal as refusal:
        os.write(2, refusal.sentence("gpulockd").encode())
        return NODE_BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
