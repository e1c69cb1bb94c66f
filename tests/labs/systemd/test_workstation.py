# SPDX-License-Identifier: Apache-2.0
"""A user's claim follows the work into scopes of the user's own systemd."""

from __future__ import annotations

import pytest

from gpulock.install.systemd.units import DAEMON
from tests.labs.systemd.gpulock import OPT, Node
from tests.labs.systemd.users_manager import cgroup_of
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
USER = "lab-bob"
SERVER = ("tmux", "-L", "lab")
# tmux moves a pane there itself, where it was built for that (from 3.4 on)
PANE = "trap '' HUP; exec systemd-run --user --scope --quiet sleep infinity"


def test_a_claim_follows_a_tmux_whose_pane_is_a_scope_of_its_own(node: Node) -> None:
    run = node.machine.run
    node.configure(USER_CLAIMS="yes")
    run("systemctl", "restart", DAEMON)
    run("useradd", "-m", USER)
    run("systemctl", "start", "dbus", "systemd-logind")
    run("loginctl", "enable-linger", USER)
    uid = run("id", "-u", USER).stdout.strip()
    manager = f"user@{uid}.service"
    wait_until(
        lambda: node.machine.show(manager, "ActiveState") == "active",
        why=lambda: "\n".join(node.machine.journal(manager)),
    )
    ids = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    user = (*ids, "env", "-C", "/", f"XDG_RUNTIME_DIR=/run/user/{uid}", f"HOME=/home/{USER}")

    run(*user, f"{OPT}/bin/gpulock", "run", "-n", "1", "--", *SERVER, "new", "-d", PANE)

    server, pane = run(*user, *SERVER, "display", "-p", "#{pid} #{pane_pid}").stdout.split()
    scope = wait_until(
        lambda: path if (path := cgroup_of(node.machine, int(pane))).endswith(".scope") else None,
        why="the pane's scope",
    )
    assert f"/{manager}/" in scope and cgroup_of(node.machine, int(server)) != scope
    node.gpulock("reap")
    assert len(node.locks()) == 1
    run("kill", "-KILL", server)
    wait_until(lambda: not node.machine.path(f"/proc/{server}").exists(), why="tmux to end")
    node.gpulock("reap")
    assert len(node.locks()) == 1
    run("kill", "-KILL", pane)
    wait_until(lambda: not node.locks(), why="gpulockd to free the GPU")
