# SPDX-License-Identifier: Apache-2.0
"""The commands around the installation for Slurm, as an administrator types them."""

from __future__ import annotations

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.admin.items import NOT_IN_FORCE
from gpulock.daemon.core.instance_lock import InstanceLock
from gpulock.install.files import lock_installation
from tests.support.runner import command_runner
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow

LACKS = "slurm.conf lacks Prolog, TaskProlog, Epilog, PrologFlags=Contain, RequeueExit=213"


def call(node: SlurmNode, *args: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(node.config), *args])


def install(node: SlurmNode, *args: str) -> Result:
    return call(node, "install", "slurm", *args)


def test_no_line_that_is_shown_is_longer_than_a_terminal(node: SlurmNode) -> None:
    node.put("SchedulerParameters", "bf_window=4320,bf_continue,bf_max_job_test=500")
    node.put("Prolog", "/site/prolog")

    said, _, page = install(node, "--dry-run").stdout.partition("Into slurm.conf")

    assert "\n3 changes would be made; then slurm.conf lacks " in said
    assert not node.map.exists()
    for line in page.replace(str(node.root), "/usr/local").splitlines():
        assert len(line) <= 100, line


def test_the_help_of_install_is_not_cut(node: SlurmNode) -> None:
    assert "..." not in call(node, "install", "--help").stdout.partition("Commands:")[2]


def test_a_second_installation_says_that_another_runs(node: SlurmNode) -> None:
    with lock_installation(node.root / "node/state"):
        refused = [install(node), call(node, "install", "slurm", "--dry-run")]
        mode = (node.root / "node/state/install.lock").stat().st_mode & 0o777

    assert ([done.exit_code for done in refused], mode) == ([1, 0], 0o600)
    assert "runs already (fuser -v " in refused[0].stderr
    assert not node.map.exists()


def test_a_refusal_is_one_line_and_exit_code_1(node: SlurmNode) -> None:
    (node.root / "slurm/bin/scontrol").unlink()
    node.set(SLURM_BINARIES="/nowhere")

    done = install(node)

    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("gpulock: install slurm: ")
    assert "no scontrol in /nowhere" in done.stderr


def test_installing_says_that_it_is_not_in_force_until_slurm_conf_has_the_lines(
    node: SlurmNode,
) -> None:
    done, again = install(node), install(node)

    assert f"done: file {node.map}\n" in done.stdout
    assert f"\ninstalled, NOT in force: {LACKS}\n" in done.stdout
    assert "scontrol reconfigure" in done.stdout and "printenv" not in done.stdout
    assert "\nnote: gpulockd does not run" in done.stdout
    assert (done.exit_code, again.exit_code) == (NOT_IN_FORCE, NOT_IN_FORCE)
    assert f"nothing to change on this node, NOT in force: {LACKS}\n" in again.stdout

    node.put_hooks()
    running = InstanceLock()
    running.take(str(node.root / "node/run/gpulock"))
    whole = install(node)
    running.release()
    assert "gpulockd does not run" not in whole.stdout
    assert whole.exit_code == 0
    assert "nothing to change: slurm is in force\n" in whole.stdout
    assert "as an ordinary user: srun --nodelist=node1 --gres=gpu:1" in whole.stdout


def test_a_gres_conf_younger_than_slurmd_is_pointed_out(node: SlurmNode) -> None:
    assert "gres.conf is younger than slurmd" in install(node, "--dry-run").stdout
