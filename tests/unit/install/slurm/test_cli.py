# SPDX-License-Identifier: Apache-2.0
"""The commands around the installation for Slurm, as an administrator types them."""

from __future__ import annotations

import os
import time

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.admin.offers import Consent
from gpulock.install.change import lock_installation
from gpulock.install.daemons import process_start_time
from tests.support.runner import command_runner
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow


def call(node: SlurmNode, *args: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(node.config), *args])


def install(node: SlurmNode, *args: str) -> Result:
    return call(node, "install", "slurm", "--prefix", f"{node.root}/libexec", *args)


def test_a_dry_run_shows_the_changes_and_the_lines_for_slurm_conf(node: SlurmNode) -> None:
    done = install(node, "--dry-run")

    assert done.exit_code == 0
    assert "3 changes would be made\n\nInto slurm.conf, the same on every node" in done.stdout
    assert f"\n    Prolog={node.paths.slurm_prolog}\n" in done.stdout
    assert not node.map.exists()


def test_no_line_that_is_shown_is_longer_than_a_terminal(node: SlurmNode) -> None:
    node.put("SchedulerParameters", "bf_window=4320,bf_continue,bf_max_job_test=500")
    node.put("Prolog", "/site/prolog")

    page = install(node, "--dry-run").stdout.partition("Into slurm.conf")[2]

    for line in page.replace(str(node.root), "/usr/local").splitlines():
        assert len(line) <= 100, line


def test_uninstall_says_that_it_is_done_or_that_there_was_nothing(node: SlurmNode) -> None:
    assert call(node, "uninstall", "slurm").stdout.startswith("nothing to do: slurm")
    install(node)

    assert call(node, "uninstall", "slurm").stdout.endswith("\nuninstalled: slurm\n")


def test_where_a_trial_job_would_prove_nothing_the_reason_is_said(node: SlurmNode) -> None:
    node.put_hooks()
    node.set(SLURM_DEVICE_SELECTION="gpulock", SLURM_COUNT="slurmctld", SLURM_GRES="gpux")

    said = " ".join(install(node).output.split())

    assert "no trial job is run: SLURM_COUNT=slurmctld, by which --gres=gpu:1 is none" in said
    assert "--yes runs one" not in said


def test_without_a_person_a_trial_job_is_named_where_one_can_be_run(node: SlurmNode) -> None:
    node.put_hooks()

    assert "--yes runs one" in " ".join(install(node).output.split())


def test_the_help_of_install_is_not_cut(node: SlurmNode) -> None:
    assert "..." not in call(node, "install", "--help").stdout.partition("Commands:")[2]


def test_what_cannot_be_installed_here_is_not_asked_about(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def choose(_: Consent, words: str | None) -> str | None:
        asked.append(words)
        return words

    monkeypatch.setattr(Consent, "choose_policy", choose)

    assert install(node, "--gpus", "4").exit_code == 1
    assert asked == []
    assert install(node, "--quarantine-on", "ecc").exit_code == 0
    assert asked == ["ecc"]


def test_a_refusal_names_the_whole_command(node: SlurmNode) -> None:
    refused = install(node, "--gpus", "4")

    assert refused.stderr.startswith("gpulock: install slurm: ")


def test_yes_writes_what_takes_a_gpu_out_of_service_and_uninstall_leaves_the_settings(
    node: SlurmNode,
) -> None:
    assert "QUARANTINE_ON=" not in node.config.read_text()

    done = install(node, "--yes")
    settings = node.config.read_text()

    assert "\nQUARANTINE_ON=xid missing\n" in node.config.read_text(), done.output
    assert "--quarantine-on" not in done.output, "what was agreed to is not offered again"
    assert "nothing to change" in install(node, "--yes").stdout
    assert call(node, "uninstall", "slurm").exit_code == 0
    assert node.config.read_text() == settings


def test_a_second_installation_says_which_process_makes_the_first(node: SlurmNode) -> None:
    with lock_installation(node.root / "node/state/install"):
        refused = [install(node), call(node, "install", "slurm", "--dry-run")]

    assert [done.exit_code for done in refused] == [1, 0]
    assert f"runs already, as process {os.getpid()}; wait until it ends" in refused[0].stderr
    assert not node.map.exists()


def test_installing_says_what_was_done_and_what_is_left_to_do(node: SlurmNode) -> None:
    done = install(node)

    assert f"done: file {node.map}\n" in done.stdout
    assert "scontrol reconfigure" in done.stdout
    assert "nothing to change" in install(node).stdout


def test_a_refusal_is_one_line_and_exit_code_1(node: SlurmNode) -> None:
    (node.root / "slurm/bin/scontrol").unlink()
    node.set(SLURM_BINARIES="/nowhere")

    done = install(node)

    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "no scontrol in /nowhere" in done.stderr


def test_uninstalling_by_force_needs_a_reason(node: SlurmNode) -> None:
    assert call(node, "uninstall", "slurm", "--force").exit_code == 2


def test_uninstalling_shows_what_must_go_from_slurm_conf_first(node: SlurmNode) -> None:
    install(node)
    node.put_hooks()

    done = call(node, "uninstall", "slurm")

    assert done.exit_code == 1
    assert f"\n    Prolog={node.paths.slurm_prolog}\n" in done.stdout
    assert "scontrol reconfigure" in done.stderr


def test_a_gres_conf_younger_than_slurmd_is_pointed_out(node: SlurmNode) -> None:
    assert "gres.conf is younger than slurmd" in install(node, "--dry-run").stdout


def test_the_start_of_a_process_is_read_by_the_clock() -> None:
    import os

    began = process_start_time(os.getpid())

    assert time.time() - 3600 < began <= time.time() + 1
