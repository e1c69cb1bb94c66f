# SPDX-License-Identifier: Apache-2.0
"""One reconcile, or one round of gpulockd with all its chores, as a process.

Usage: python -IS round.py LIBRARIES reap|round CONFIG. The exit codes are those of `gpulock reap`,
without its CLI's imports. The sweep stops it at every system call.
"""

import os
import sys

sys.path[:0] = sys.argv[1].split(":")

from gpulock.deadline import Deadline, clock_boottime  # noqa: E402 (the library is put on the path first)
from gpulock.errors import BROKEN, Refusal  # noqa: E402
from gpulock.node.context import Node  # noqa: E402
from gpulock.node.settings_file import read_settings  # noqa: E402

DONE, REFUSED, NODE_BROKEN = 0, 1, 3


def reap(config: str) -> int:
    """Reconcile once."""
    from gpulock.daemon.reconcile.reconcile import reconcile_locks
    from gpulock.schedulers.liveness import make_liveness_judge

    node = Node(read_settings(config))
    reconcile_locks(node, make_liveness_judge(node), Deadline(20))
    return DONE


def go_round(config: str) -> int:
    """Go round once."""
    from gpulock.daemon.app import make_daemon_chores
    from gpulock.daemon.core.instance_lock import AlreadyRunningError
    from gpulock.daemon.core.journal import DaemonJournal
    from gpulock.daemon.main_loop import Rounds
    from gpulock.daemon.reconcile.reconcile import DaemonNode

    journal = DaemonJournal(quiet=True)
    try:
        rounds = Rounds(DaemonNode(read_settings(config)), journal, make_daemon_chores(journal))
        return DONE if rounds.run_round(clock_boottime()) is not None else NODE_BROKEN
    except AlreadyRunningError:
        return REFUSED


def main(what: str, config: str) -> int:
    """Do it; return the exit code."""
    try:
        return (reap if what == "reap" else go_round)(config)
    except Refusal as refusal:
        os.write(2, refusal.sentence(what).encode())
        return NODE_BROKEN if what == "round" or refusal.kind == BROKEN else REFUSED
    except OSError as fault:
        os.write(2, f"{what}: {fault}".encode())
        return NODE_BROKEN


if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
