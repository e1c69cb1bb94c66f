# SPDX-License-Identifier: Apache-2.0
"""What the tests of the services ask of units, their journals and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpulock.install.systemd.units import DAEMON
from gpulock.store.owner import Owner
from tests.labs.systemd.gpulock import Node
from tests.support.wait import wait_until

# Opens device nodes for reading and writing, as the user and in the sandbox that it runs in.
PROBE: Final = """
import errno, os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        said = "OPEN"
    except OSError as fault:
        said = errno.errorcode[fault.errno]
    print(path, said)
"""


def show(node: Node, unit: str, name: str) -> str:
    return node.machine.show(unit, name)


def journal(node: Node, unit: str) -> str:
    return "\n".join(node.machine.journal(unit))


def wait_journal(node: Node, unit: str, words: str) -> None:
    wait_until(lambda: words in journal(node, unit), why=f"{words!r} in the journal")


def rounds_until(node: Node, holds: Callable[[], bool], why: str) -> None:
    """Have gpulockd reconcile until something holds that it does in its own time, too."""

    def holds_after_a_round() -> bool:
        node.machine.run("systemctl", "reload", DAEMON)
        return holds()

    wait_until(holds_after_a_round, why=why)


def wait_sleeps(node: Node, unit: str) -> int:
    """Wait until a unit's process has become its user's and sleeps; return it."""
    pid = node.main_pid(unit)
    name = ("cat", f"/proc/{pid}/comm")
    wait_until(lambda: node.machine.run(*name).stdout == "sleep\n", why=f"{unit} to be himself")
    return pid


def outlive_watchdog(node: Node, unit: str, *lines: str) -> int:
    """Have a limit of the watchdog pass over a unit; return its process, which is the first."""
    node.reload(unit, "WatchdogSec=6", *lines)
    first = node.main_pid(unit)
    name = "WatchdogTimestampMonotonic"
    began = int(show(node, unit, name))
    wait_until(
        lambda: int(show(node, unit, name)) > began + 6_000_000,
        why="a limit of the watchdog to pass",
    )
    assert (node.main_pid(unit), show(node, unit, "NRestarts")) == (first, "0")
    return first


def records(locks: dict[str, Owner]) -> dict[str, str]:
    return {name: record.token for name, record in locks.items()}
