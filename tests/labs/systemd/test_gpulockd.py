# SPDX-License-Identifier: Apache-2.0
"""gpulockd under a real systemd, with cgroup v2 alone and with v1 beside it.

The machine has eight simulated cards that a double of NVML tells of; a job is `gpulock run` in a
unit of its own.
"""

from __future__ import annotations

import pytest

from gpulock.install.systemd.units import DAEMON
from tests.labs.systemd.gpulock import GPUS, OPT, Node
from tests.labs.systemd.services import (
    PROBE,
    journal,
    outlive_watchdog,
    records,
    rounds_until,
    show,
    wait_journal,
)
from tests.support.fake_mps import PROGRAM as MPS_PROGRAM
from tests.support.history_site import read_history
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NOBODY = 65534


def test_gpulockd_is_ready_once_it_reconciled_and_the_journal_says_why_it_frees(node: Node) -> None:
    node.machine.run("systemctl", "stop", DAEMON)
    node.machine.run("rm", "-f", "/run/gpulock/verdicts")

    node.machine.run("systemctl", "start", DAEMON)

    assert node.machine.path("/run/gpulock/verdicts").exists()
    assert show(node, DAEMON, "StatusText") == f"0 of {GPUS} devices held"
    held = node.claim(2)
    wait_until(
        lambda: show(node, DAEMON, "StatusText") == f"2 of {GPUS} devices held",
        why=lambda: "the status to follow\n" + show(node, DAEMON, "StatusText"),
    )

    node.machine.run("systemctl", "kill", "--signal=KILL", "job")

    wait_until(lambda: not node.locks(), why="the devices to be free")
    # of this gpulockd and this job, not of earlier ones; no <5> is left of the priority
    pid = next(iter(held.values())).pid
    words = f"gpulockd[{node.main_pid(DAEMON)}]: freed {' '.join(sorted(held))} of pid {pid} "
    notices = ("journalctl", "-u", DAEMON, "-p", "notice", "-o", "short", "--no-pager")
    (line,) = wait_until(
        lambda: (
            [one for one in node.machine.run(*notices).stdout.splitlines() if words in one] or None
        ),
        why=f"{words!r} in the journal",
    )
    assert "is gone" in line
    state = node.machine.path("/var/lib/gpulock")
    token = next(iter(held.values())).token
    rounds_until(
        node,
        lambda: token in [line["token"] for line in read_history(state)],
        why="its line in the history",
    )


def test_a_daemon_that_hangs_is_killed_and_says_where_it_hung_and_one_that_works_is_left_alone(
    node: Node,
) -> None:
    held = records(node.claim(2))
    first = outlive_watchdog(node, DAEMON, "RestartSec=100ms")

    node.machine.run("kill", "-STOP", str(first))

    wait_until(
        lambda: (
            node.main_pid(DAEMON) not in (0, first)
            and show(node, DAEMON, "ActiveState") == "active"
        ),
        why="another gpulockd",
    )
    assert show(node, DAEMON, "NRestarts") == "1"
    for words in ("Watchdog timeout (limit 6s)!", "Fatal Python error: Aborted", "main_loop.py"):
        wait_journal(node, DAEMON, words)
    assert records(node.locks()) == held


def opened_from_a_session(node: Node) -> str:
    """Return what becomes of opening a card from below user.slice, where logins are."""
    line = ["systemd-run", "--quiet", "--pipe", "--wait", "--slice=user.slice", "--uid=65534"]
    done = node.machine.run(*line, f"{OPT}/bin/python3", "-c", PROBE, "/dev/nvidia0")
    return done.stdout.split()[1]


def test_isolation_is_looked_after_and_cleared_away_from_within_the_units_sandbox(
    node: Node,
) -> None:
    node.machine.run("systemctl", "start", "user.slice")
    assert opened_from_a_session(node) == "ENXIO"  # allowed: there is no driver behind it
    node.machine.run("touch", "/run/gpulock.claims/isolation")  # a job was confined in this boot

    node.configure(ISOLATION="cgroup", SYS_ROOT="/sys")
    node.gpulock("install", "systemd")
    assert opened_from_a_session(node) == "EPERM"
    node.configure(SYS_ROOT="/sys")
    node.gpulock("install", "systemd")
    node.machine.run("systemctl", "restart", DAEMON)

    assert opened_from_a_session(node) == "ENXIO"
    wait_until(
        lambda: not node.machine.path("/run/gpulock.claims/isolation").exists(),
        why="the mark to go",
    )
    assert "isolation:" not in journal(node, DAEMON)
    node.configure()
    node.gpulock("install", "systemd")
    assert show(node, DAEMON, "ProtectControlGroups") == "yes"


def test_the_kernels_log_is_read_from_within_the_units_sandbox(node: Node) -> None:
    unknown = "XIDs are not known: the kernel's log cannot be read"
    node.reload(DAEMON, "ProtectKernelLogs=yes")
    wait_journal(node, DAEMON, unknown)
    before = journal(node, DAEMON).count(unknown)
    node.reload(DAEMON, "ProtectKernelLogs=no")
    opened = ("ls", "-l", f"/proc/{node.main_pid(DAEMON)}/fd")
    rounds_until(
        node, lambda: "/dev/kmsg" in node.machine.run(*opened).stdout, why="the log to be open"
    )
    assert journal(node, DAEMON).count(unknown) == before


def test_an_mps_is_a_service_of_its_own_from_the_first_share_to_the_last(node: Node) -> None:
    machine, unit = node.machine, "gpulock-mps-0000-06-00.0.service"
    for name in ("control", "server"):
        path = f"/usr/bin/nvidia-cuda-mps-{name}"
        machine.write(path, MPS_PROGRAM.replace("{python}", "/usr/bin/python3"))
        machine.run("chmod", "755", path)
    machine.write("/usr/bin/faults", "no-card deaf-server")  # beside the stand-in, which reads it
    node.configure(SHARES="0:2", SHARE_MPS="yes", USER_CLAIMS="yes")
    node.gpulock("install", "systemd")
    line = [f"{OPT}/bin/gpulock", "run", "--share", "-n", "1", "--", "sleep", "infinity"]
    machine.run("systemd-run", "--quiet", "--unit=job", f"--uid={NOBODY}", *line)

    mark = wait_until(
        lambda: (
            machine.run("sh", "-c", "cat /run/gpulock.claims/*/*/mps", check=False).stdout or None
        ),
        why="the MPS of the card",
    )
    daemon = node.main_pid(unit)
    assert mark.split()[0] == str(daemon), mark
    uid = machine.run("stat", "-c", "%u", f"/proc/{daemon}").stdout.strip()
    inside = machine.run("sh", "-c", f"grep -l {unit} /proc/[0-9]*/cgroup | wc -l").stdout.strip()
    machine.run("systemctl", "restart", DAEMON)
    restarted = node.main_pid(unit)
    machine.run("systemctl", "stop", "job")
    wait_journal(node, DAEMON, "MPS of 0000:06:00.0 ended")
    left = machine.run("ls", "/var/lib/gpulock-mps").stdout
    ended = show(node, unit, "ActiveState")
    node.configure()
    node.gpulock("install", "systemd")

    assert (uid, inside, restarted) == (str(NOBODY), "2", daemon)
    assert (left, ended) == ("", "inactive"), "the server that takes no signal was killed"
