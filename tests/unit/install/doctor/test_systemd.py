# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the services that systemd runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpulock.install.doctor.check import WARNING, Finding, run_checks
from gpulock.install.doctor.daemon import systemd_checks
from gpulock.install.systemd import install, manager, units
from gpulock.install.systemd.units import PACKAGE_PYTHON
from tests.support.systemd_site import SystemdNode, make_systemd_node

DAEMON, EXPORTER = "gpulockd.service", "gpulock-exporter.service"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    made = make_systemd_node(tmp_path, monkeypatch)
    made.install()
    return made


def look(node: SystemdNode) -> list[Finding]:
    return run_checks(systemd_checks(node.config)).findings


def test_nothing_is_said_where_nothing_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(make_systemd_node(tmp_path, monkeypatch)) == []


def test_nothing_is_said_where_systemd_does_not_run(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", node.root / "nowhere")

    assert look(node) == []


def test_a_unit_that_is_not_what_would_be_installed_is_named(node: SystemdNode) -> None:
    node.set(EXPORTER_LISTEN=":9999")

    first = look(node)[0]

    assert first.state == WARNING
    assert first.what.endswith("/etc/systemd/system/gpulock-exporter.socket.d/10-gpulock.conf")
    assert first.do == "gpulock install systemd"


def test_a_drop_in_that_cannot_be_made_is_said(node: SystemdNode) -> None:
    node.set(EXPORTER_LISTEN="localhost:9465")

    first = look(node)[0]

    assert (first.name, first.state) == ("services", WARNING)
    assert "not on a name; give the address" in first.what


def test_a_service_that_is_stopped_is_left_to_the_checks_of_the_programs(node: SystemdNode) -> None:
    node.ctl.mark("active", DAEMON, "")

    assert look(node) == []


def test_a_unit_that_is_gone_wants_another_installation(node: SystemdNode) -> None:
    install.unit_path(DAEMON).unlink()

    last = look(node)[-1]

    assert str(install.unit_path(DAEMON)) in last.what
    assert last.do == "gpulock install systemd"


def test_a_unit_that_was_changed_since_it_was_read_wants_a_restart(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON] = {"NeedDaemonReload": "yes"}

    last = look(node)[-1]

    assert (last.state, last.do) == (WARNING, "gpulock install systemd")


# --- the units that the package brings ----------------------------------------------------------


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    """Give a node on which nobody ran `gpulock install systemd`."""
    node = make_systemd_node(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "executable", PACKAGE_PYTHON)
    monkeypatch.setattr(units, "DEFAULT_PATH", str(node.config))
    monkeypatch.setattr(units, "_UNIT_WRITES", ("/run", str(tmp_path)))
    node.give_package_units()
    return node


def test_services_of_the_package_that_nobody_started_are_no_fault(packaged: SystemdNode) -> None:
    assert look(packaged) == []


def test_a_service_of_the_package_that_runs_is_well(packaged: SystemdNode) -> None:
    packaged.ctl("enable", DAEMON)
    packaged.ctl("restart", DAEMON)

    assert look(packaged) == []


def test_the_packages_units_are_for_default_settings_and_doctor_says_where_these_are_not(
    packaged: SystemdNode,
) -> None:
    packaged.ctl("restart", DAEMON)
    packaged.set(EXPORTER_LISTEN=":9999")
    assert look(packaged) == []  # the exporter does not run
    packaged.set(ISOLATION="cgroup")

    first = look(packaged)[0]

    assert (first.name, first.state) == ("services", WARNING)
    assert first.what.endswith(f": {install.drop_in_path(DAEMON)}")
    assert first.do == "gpulock install systemd"
