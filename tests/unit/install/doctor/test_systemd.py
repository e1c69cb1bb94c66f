# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the services that systemd runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpulock.install.doctor.check import FAULT, WARNING, Finding, run_checks
from gpulock.install.doctor.systemd import EXACT, RULES, systemd_checks
from gpulock.install.systemd import manager, units
from gpulock.install.systemd.units import PACKAGE_PYTHON, UNITS, read_static_files
from gpulock.node.settings_file import read_settings
from tests.support.systemd_site import SystemdNode, make_systemd_node

DAEMON, EXPORTER = "gpulockd.service", "gpulock-exporter.service"
GOOD = {
    DAEMON: {
        "CapabilityBoundingSet": (
            "cap_dac_override cap_dac_read_search cap_kill cap_sys_ptrace cap_syslog"
        ),
        "DevicePolicy": "closed",
        "KillMode": "control-group",
        "MemoryDenyWriteExecute": "yes",
        "NoNewPrivileges": "yes",
        "ProtectControlGroups": "yes",
        "ProtectKernelLogs": "no",
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


def look(node: SystemdNode) -> list[Finding]:
    return run_checks(systemd_checks(read_settings(str(node.config)), node.options)).findings


def test_all_is_well_after_an_installation(node: SystemdNode) -> None:
    assert look(node) == []


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
    node.ctl.active.discard(DAEMON)

    assert look(node) == []


def test_a_unit_that_is_gone_wants_another_installation(node: SystemdNode) -> None:
    node.options.unit_path(DAEMON).unlink()

    last = look(node)[-1]

    assert str(node.options.unit_path(DAEMON)) in last.what
    assert last.do == "gpulock install systemd"


def test_a_unit_that_another_one_hides_is_named(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["FragmentPath"] = "/run/systemd/system/gpulockd.service"

    found = [check for check in look(node) if check.name == DAEMON]

    assert [check.do for check in found] == ["remove /run/systemd/system/gpulockd.service"]


def test_a_unit_that_was_changed_since_it_was_read_wants_a_restart(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["NeedDaemonReload"] = "yes"

    last = look(node)[-1]

    assert (last.state, last.do) == (WARNING, "gpulock install systemd")


@pytest.mark.parametrize(
    ("unit", "name", "value", "state"),
    [
        (DAEMON, "CapabilityBoundingSet", "cap_kill cap_dac_override cap_syslog", FAULT),
        (DAEMON, "CapabilityBoundingSet", "cap_sys_ptrace cap_syslog", FAULT),
        (DAEMON, "CapabilityBoundingSet", "cap_sys_ptrace cap_dac_override", WARNING),
        (DAEMON, "ProtectKernelLogs", "yes", WARNING),
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
    folder = f"/etc/systemd/system/{unit}.d"
    node.ctl.properties[unit]["DropInPaths"] = f"{folder}/10-gpulock.conf {folder}/override.conf"

    found = [check for check in look(node) if check.name == unit]

    assert [(check.state, check.what.partition(":")[0]) for check in found] == [
        (state, f"{name}={value}")
    ]
    assert found[0].do == f"look at /etc/systemd/system/{unit}.d/override.conf"


@pytest.mark.parametrize("unit", [DAEMON, EXPORTER])
@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ("/run/site/gpulock", "site/gpulock"),
        ("/run/site/gpulock/locks", "site/gpulock"),
        ("/run/site/gpulock", "site/gpulock.claims"),
    ],
)
def test_a_service_that_owns_the_folder_of_the_locks_is_a_fault(
    node: SystemdNode, unit: str, where: str, taken: str
) -> None:
    node.config.write_text(
        "\n".join(
            f"LOCK_DIR={where}" if line.startswith("LOCK_DIR=") else line
            for line in node.config.read_text().splitlines()
        )
        + "\n"
    )
    node.ctl.properties[unit]["RuntimeDirectory"] = f"other {taken}"

    found = [check for check in look(node) if check.name == unit]

    assert [check.state for check in found] == [FAULT]
    assert "the locks are removed when it stops" in found[0].what


def test_watchdogs_of_another_length_are_the_sites_own(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["WatchdogUSec"] = "5min"
    node.ctl.properties[DAEMON]["Restart"] = "always"

    assert look(node) == []


def test_every_rule_is_about_a_property_that_the_tests_know() -> None:
    known = {name for found in GOOD.values() for name in found}
    assert {rule.name for rule in RULES} | {*EXACT} == known


NEEDED = {
    "QUARANTINE_RESET": ({"QUARANTINE_RESET": "yes"}, "cap_sys_admin", {"DevicePolicy": "auto"}),
    "HEALTH_COMMAND": (
        {"HEALTH_COMMAND": "/bin/true"},
        "cap_setuid cap_setgid",
        {"DevicePolicy": "auto", "NoNewPrivileges": "no", "MemoryDenyWriteExecute": "no"},
    ),
    "IDLE_COMMAND": (
        {"IDLE_COMMAND": "/bin/true"},
        "cap_setuid cap_setgid",
        {"NoNewPrivileges": "no", "MemoryDenyWriteExecute": "no"},
    ),
    "SHARE_MPS": (
        {"SHARES": "0:2", "SHARE_MPS": "yes"},
        "cap_chown",
        {},
    ),
    "ISOLATION": ({"ISOLATION": "cgroup"}, "cap_sys_admin", {"ProtectControlGroups": "no"}),
}


@pytest.mark.parametrize("setting", NEEDED)
def test_a_unit_in_force_that_lacks_what_a_setting_needs_is_named(
    node: SystemdNode, setting: str
) -> None:
    keys, capabilities, others = NEEDED[setting]
    node.set(**keys)
    node.install()

    lacking = [check for check in look(node) if check.name == DAEMON]
    node.ctl.properties[DAEMON]["CapabilityBoundingSet"] += f" {capabilities}"
    node.ctl.properties[DAEMON].update(others)
    met = [check for check in look(node) if check.name == DAEMON]

    assert [(check.state, check.do) for check in lacking] == [(WARNING, "gpulock install systemd")]
    assert lacking[0].what.startswith(f"{setting} does not work without ")
    for word in (*capabilities.upper().split(), *(f"{name}={now}" for name, now in others.items())):
        assert word in lacking[0].what
    assert met == []


def test_a_setting_lacks_nothing_that_a_drop_in_allows_besides(node: SystemdNode) -> None:
    node.ctl.properties[DAEMON]["ProtectControlGroups"] = "no"
    node.ctl.properties[DAEMON]["DevicePolicy"] = "auto"

    assert look(node) == []


# --- the units that the package brings ----------------------------------------------------------


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    """Give a node on which nobody ran `gpulock install systemd`."""
    node = make_systemd_node(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "executable", PACKAGE_PYTHON)
    monkeypatch.setattr(units, "DEFAULT_PATH", str(node.config))
    monkeypatch.setattr(units, "_UNIT_WRITES", ("/run", str(tmp_path)))
    node.ctl.folder = tmp_path / "usr/lib/systemd/system"
    node.ctl.folder.mkdir(parents=True)
    for name in UNITS:
        text = read_static_files()[name].replace("/etc/gpulock/gpulock.conf", str(node.config))
        (node.ctl.folder / name).write_text(text)
    node.ctl.properties.update({unit: dict(found) for unit, found in GOOD.items()})
    return node


def test_services_of_the_package_that_nobody_started_are_no_fault(packaged: SystemdNode) -> None:
    assert look(packaged) == []


def test_a_service_of_the_package_that_runs_is_well(packaged: SystemdNode) -> None:
    packaged.ctl("enable", DAEMON)
    packaged.ctl("restart", DAEMON)
    path = packaged.ctl.folder / DAEMON  # as systemd of Debian 12 names it
    (packaged.root / "lib").symlink_to("usr/lib")
    shown = str(path).replace("/usr/lib/", "/lib/")
    packaged.ctl.properties[DAEMON]["FragmentPath"] = shown

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
    assert first.what.endswith(f": {packaged.options.drop_in_path(DAEMON)}")
    assert first.do == "gpulock install systemd"


def test_a_drop_in_that_breaks_a_service_of_the_package_is_a_fault(packaged: SystemdNode) -> None:
    packaged.ctl("restart", DAEMON)
    packaged.ctl.properties[DAEMON]["ProtectProc"] = "invisible"

    assert FAULT in [check.state for check in look(packaged)]


def test_a_packages_unit_in_place_of_the_installed_one_is_not_to_be_removed(
    node: SystemdNode,
) -> None:
    node.options.unit_path(DAEMON).unlink()
    node.ctl.folder = node.root / "usr/lib/systemd/system"
    node.ctl.folder.mkdir(parents=True)
    for name in UNITS:
        (node.ctl.folder / name).touch()

    found = [check for check in look(node) if check.name == DAEMON]

    assert [check.do for check in found] == ["gpulock install systemd"]
