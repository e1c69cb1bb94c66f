# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the services that systemd runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.install.doctor.check import WARNING, Finding, run_checks
from gpulock.install.doctor.daemon import systemd_checks
from gpulock.install.systemd import install, manager, units
from gpulock.install.systemd.units import PACKAGE_PYTHON
from tests.support.systemd_site import SystemdNode, make_systemd_node

DAEMON = "gpulockd.service"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    made = make_systemd_node(tmp_path, monkeypatch)
    made.install()
    return made


def look(node: SystemdNode) -> list[Finding]:
    return run_checks(systemd_checks(node.config)).findings


def test_nothing_is_said_where_nothing_was_installed_or_no_systemd_runs(
    tmp_path: Path, node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", node.root / "nowhere")
    assert look(node) == []
    assert look(make_systemd_node(tmp_path / "other", monkeypatch)) == []


def wrong_drop_in(node: SystemdNode) -> None:
    node.set(EXPORTER_LISTEN=":9999")


def no_drop_in(node: SystemdNode) -> None:
    node.set(EXPORTER_LISTEN="localhost:9465")


def lost_unit(_: SystemdNode) -> None:
    install.unit_path(DAEMON).unlink()


def changed_unit(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON] = {"NeedDaemonReload": "yes"}


@pytest.mark.parametrize(
    ("plant", "name", "says", "do"),
    [
        (
            wrong_drop_in,
            "services",
            "/gpulock-exporter.socket.d/10-gpulock.conf",
            "install systemd",
        ),
        (no_drop_in, "services", "not on a name; give the address", ""),
        (lost_unit, "services", "lib/systemd/system/gpulockd.service", "install systemd"),
        (changed_unit, "gpulockd", "was changed since systemd read it", "install systemd"),
    ],
)
def test_what_is_not_as_it_would_be_installed_is_named(
    node: SystemdNode, plant: Callable[[SystemdNode], None], name: str, says: str, do: str
) -> None:
    plant(node)

    (first,) = look(node)

    assert (first.name, first.state, says in first.what) == (name, WARNING, True), first
    assert do in first.do


def test_a_service_that_is_stopped_is_left_to_the_checks_of_the_programs(node: SystemdNode) -> None:
    node.ctl.mark("active", DAEMON, "")

    assert look(node) == []


def test_of_the_packages_units_those_that_run_are_compared_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_systemd_node(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "executable", PACKAGE_PYTHON)
    monkeypatch.setattr(units, "DEFAULT_PATH", str(node.config))
    monkeypatch.setattr(units, "_UNIT_WRITES", ("/run", str(tmp_path)))
    node.give_package_units()
    assert look(node) == []  # nobody started any
    node.ctl("enable", DAEMON)
    node.ctl("restart", DAEMON)
    assert look(node) == []
    node.set(EXPORTER_LISTEN=":9999")
    assert look(node) == []  # the exporter does not run
    node.set(ISOLATION="cgroup")

    (first,) = look(node)

    assert (first.name, first.state) == ("services", WARNING)
    assert first.what.endswith(f": {install.drop_in_path(DAEMON)}")
    assert first.do == "gpulock install systemd"
