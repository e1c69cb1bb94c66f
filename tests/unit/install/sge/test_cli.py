# SPDX-License-Identifier: Apache-2.0
"""The commands around the installation for Grid Engine, as an administrator types them."""

from __future__ import annotations

import syslog

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.admin.items import NOT_IN_FORCE
from tests.support.install_site import Site, tree
from tests.support.runner import command_runner

pytestmark = pytest.mark.slow
CLUSTER = ("--cluster", "--queue", "gpu.q")


def call(site: Site, *args: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(site.config), *args])


def install(site: Site, *args: str) -> Result:
    return call(site, "install", "sge", *args)


def test_what_belongs_to_the_cluster_is_not_taken_for_the_nodes(site: Site) -> None:
    assert install(site, "--queue", "gpu.q").exit_code == 2
    assert install(site, "--cluster").exit_code == 2
    for words in (["--sge-cell", "x"], ["--write-conf"]):
        assert call(site, "uninstall", "sge", *words).exit_code == 2
    assert call(site, "uninstall", "slurm", "--cluster").exit_code == 2


def test_the_verdict_says_whether_it_is_in_force(site: Site) -> None:
    before = tree(site.state)
    alone = install(site)
    assert alone.exit_code == NOT_IN_FORCE
    left = "there is no complex gpu.free gpu.quarantined; no queue of node1 has hooks for @gpulock"
    assert f"\ninstalled, NOT in force: {left}" in alone.stdout
    assert (tree(site.state), (site.hooks / "current/prolog/sge").is_file()) == (before, True)
    assert "once, by a manager: gpulock --config" in alone.stdout

    cluster = install(site, *CLUSTER)
    assert (cluster.exit_code, "\ninstalled: sge --cluster\n" in cluster.stdout) == (0, True)
    assert "gpulockd does not run" not in cluster.stdout, "it is no node's"
    whole = install(site)
    assert (whole.exit_code, "\ninstalled: sge\n" in whole.stdout) == (0, True)
    assert "as an ordinary user: qsub -q gpu.q@node1 -l gpu=1" in " ".join(whole.stdout.split())
    assert "nothing to change: sge is in force\n" in install(site).stdout


def test_both_ways_are_shown_and_the_cluster_goes_last(site: Site) -> None:
    install(site, *CLUSTER)
    install(site)
    shown = call(site, "uninstall", "sge", "--dry-run")
    assert (shown.exit_code, "  - node1 in @gpulock\n" in shown.stdout) == (0, True)
    assert f"  - shepherd_cmd {site.hooks}/current/prolog/sge_shepherd\n" in shown.stdout
    early = call(site, "uninstall", "sge", "--cluster")
    assert (early.exit_code, "hosts are in @gpulock: node1" in early.stdout) == (NOT_IN_FORCE, True)
    assert site.in_force("prolog") == site.hook("prolog")

    done = call(site, "uninstall", "sge")

    assert done.exit_code == 0
    said = ["uninstalled: sge", f"{site.config}, locks and history stay"]
    assert done.stdout.splitlines()[-2:] == said
    last = call(site, "uninstall", "sge", "--cluster")
    assert (last.exit_code, last.stdout.splitlines()[-1]) == (0, "uninstalled: sge --cluster")
    assert call(site, "uninstall", "sge").stdout.startswith("nothing to do: sge")


def test_a_force_is_logged_with_its_reason(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(syslog, "syslog", lambda _, line: said.append(line))
    install(site, *CLUSTER)
    install(site)
    (site.root / "node/run/gpulock/locks/0000:06:00.0").mkdir(parents=True)

    assert call(site, "uninstall", "sge", "--force").exit_code == 2
    done = call(site, "uninstall", "sge", "--force", "--reason", "moved")

    assert done.exit_code == 0
    assert said == ["gpulock: sge is uninstalled by force: moved"]
