# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the services that systemd runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.doctor.check import FAULT, OK, WARNING, Check
from gpulock.install.doctor.systemd import RULES, systemd_checks
from gpulock.install.systemd import manager
from gpulock.node.settings import read_settings
from tests.support.systemd_site import SystemdNode, make_systemd_node

DAEMON, EXPORTER = "gpulockd.service", "gpulock-exporter.service"
GOOD = {
    DAEMON: {
        "CapabilityBoundingSet": "cap_dac_override cap_dac_read_search cap_kill cap_sys_ptrace",
        "ProtectProc": "default",
        "ProcSubset": "all",
        "PrivateUsers": "no",
        "PrivateDevices": "no",
        "User": "",
        "RuntimeDirectory": "",
        "Restart": "on-failure",
        "WatchdogUSec": "1min 30s",
    },
    EXPORTER: {
        "DynamicUser": "no",
        "User": "gpulock-exporter",
        "PrivateDevices": "no",
        "ProtectProc": "default",
        "RuntimeDirectory": "gpulock-exporter:",
    },
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    made = make_systemd_node(tmp_path, monkeypatch)
    made.install()
    made.ctl.properties.update({unit: dict(found) for unit, found in GOOD.items()})
    return made


def look(node: SystemdNode) -> list[Check]:
    return systemd_checks(read_settings(str(node.config)), node.config, node.etc, node.ctl)


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_all_is_well_after_an_installation(node: SystemdNode) -> None:
    assert states(look(node)) == {"units": OK, "gpulock-exporter": OK, "gpulockd": OK}


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
    assert first.what.endswith("/etc/systemd/system/gpulock-exporter.socket")
    assert first.do == "run gpulock install systemd again"


def test_units_are_not_judged_without_a_driver(node: SystemdNode) -> None:
    node.config.write_text(node.config.read_text().replace("/proc/driver", "/none"))

    assert "were not compared" in look(node)[0].what


def test_a_service_that_is_stopped_is_a_warning_with_the_command(node: SystemdNode) -> None:
    node.ctl.active.discard(DAEMON)

    last = look(node)[-1]

    assert (last.name, last.state, last.what) == ("gpulockd", WARNING, "is enabled, inactive")
    assert last.do == "systemctl enable --now gpulockd.service"


def test_a_service_that_is_gone_wants_another_installation(node: SystemdNode) -> None:
    (node.etc / "systemd/system" / DAEMON).unlink()

    last = look(node)[-1]

    assert (last.name, last.what) == ("gpulockd", "is not there")
    assert last.do == "run gpulock install systemd again"


def test_a_unit_that_another_one_hides_is_named(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["FragmentPath"] = "/run/systemd/system/gpulockd.service"

    found = [check for check in look(node) if check.name == DAEMON]

    assert [check.do for check in found] == ["remove /run/systemd/system/gpulockd.service"]


def test_a_unit_that_was_changed_since_it_was_read_wants_a_restart(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["NeedDaemonReload"] = "yes"

    last = look(node)[-1]

    assert (last.state, last.do) == (WARNING, "systemctl restart gpulockd.service")


@pytest.mark.parametrize(
    ("unit", "name", "value", "state"),
    [
        (DAEMON, "CapabilityBoundingSet", "cap_kill cap_dac_override", FAULT),
        (DAEMON, "CapabilityBoundingSet", "cap_sys_ptrace", FAULT),
        (DAEMON, "ProtectProc", "invisible", FAULT),
        (DAEMON, "ProcSubset", "pid", FAULT),
        (DAEMON, "PrivateUsers", "yes", FAULT),
        (DAEMON, "User", "gpulock", FAULT),
        (DAEMON, "PrivateDevices", "yes", WARNING),
        (DAEMON, "Restart", "no", WARNING),
        (DAEMON, "WatchdogUSec", "0", WARNING),
        (DAEMON, "WatchdogUSec", "infinity", WARNING),
        (EXPORTER, "DynamicUser", "yes", FAULT),
        (EXPORTER, "PrivateDevices", "yes", FAULT),
        (EXPORTER, "User", "root", WARNING),
        (EXPORTER, "ProtectProc", "ptraceable", WARNING),
    ],
)
def test_a_drop_in_that_breaks_a_service_is_found_by_what_it_makes_of_it(
    node: SystemdNode, unit: str, name: str, value: str, state: str
) -> None:
    node.ctl.properties[unit][name] = value
    node.ctl.properties[unit]["DropInPaths"] = f"/etc/systemd/system/{unit}.d/override.conf"

    found = [check for check in look(node) if check.name == unit]

    assert [(check.state, check.what.partition(":")[0]) for check in found] == [
        (state, f"{name}={value}")
    ]
    assert found[0].do == f"look at /etc/systemd/system/{unit}.d/override.conf"


@pytest.mark.parametrize("unit", [DAEMON, EXPORTER])
@pytest.mark.parametrize("folder", ["gpulock", "run"])
def test_a_service_that_owns_the_folder_of_the_locks_is_a_fault(
    node: SystemdNode, unit: str, folder: str
) -> None:
    where = {"gpulock": "/run/site/gpulock", "run": "/run/site/gpulock/locks"}[folder]
    node.config.write_text(
        "\n".join(
            f"LOCK_DIR={where}" if line.startswith("LOCK_DIR=") else line
            for line in node.config.read_text().splitlines()
        )
        + "\n"
    )
    node.ctl.properties[unit]["RuntimeDirectory"] = "other site/gpulock"

    found = [check for check in look(node) if check.name == unit]

    assert [check.state for check in found] == [FAULT]
    assert "the locks are removed when it stops" in found[0].what


def test_watchdogs_of_another_length_are_the_sites_own(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["WatchdogUSec"] = "5min"
    node.ctl.properties[DAEMON]["Restart"] = "always"

    assert states(look(node))["gpulockd"] == OK


def test_every_rule_is_about_a_property_that_the_tests_know() -> None:
    assert {rule.name for rule in RULES} == {name for found in GOOD.values() for name in found}
