# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`, with a systemctl that only keeps states."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.install.hooks import InstallError
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import SystemdUninstaller, plan_systemd, systemd_services
from gpulock.install.systemd.manager import (
    ON,
    SystemdService,
    first_file_newer,
    package_files,
    unit_state,
)
from tests.support.install_site import ignore
from tests.support.runner import command_runner
from tests.support.systemd_site import SystemdNode, driver, make_systemd_node

STARTED = ["restart gpulock-exporter.socket gpulock-exporter.service", "restart gpulockd.service"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    return make_systemd_node(tmp_path, monkeypatch)


def files(node: SystemdNode) -> dict[str, str]:
    found = [path for path in node.etc.rglob("*") if path.is_file()]
    return {str(path.relative_to(node.etc)): path.read_text() for path in found}


def restarts(node: SystemdNode) -> list[str]:
    return [line for line in node.ctl.told if line.startswith("restart")]


def test_both_services_are_installed_enabled_and_started_the_socket_first(
    node: SystemdNode,
) -> None:
    node.install()

    assert {*files(node)} == {
        "gpulock/gpulock.conf",
        "systemd/system/gpulockd.service",
        "systemd/system/gpulock-exporter.service",
        "systemd/system/gpulock-exporter.socket",
        "tmpfiles.d/gpulock.conf",
        "sysusers.d/gpulock.conf",
        "logrotate.d/gpulock",
    }
    assert restarts(node) == STARTED
    assert [service.read() for service in systemd_services(node.ctl)] == [ON, ON]
    assert (node.root / "run/gpulock").is_dir()


def test_a_second_installation_changes_nothing(node: SystemdNode) -> None:
    node.install()

    assert plan_systemd(node.options).changes == []


def test_a_mark_of_isolation_among_the_records_lets_gpulockd_clear_it_away(
    node: SystemdNode,
) -> None:
    (node.root / "run/gpulock.claims").mkdir(parents=True)
    (node.root / "run/gpulock.claims/isolation").touch()
    node.install()
    assert "\nProtectControlGroups=no\n" in node.unit("gpulockd.service")


def test_every_change_is_planned_before_one_is_made(node: SystemdNode) -> None:
    plan = plan_systemd(node.options)

    assert files(node).keys() == {"gpulock/gpulock.conf"}
    assert node.ctl.told == []
    assert [change.what for change in plan.changes] == [
        f"folder {node.root}/run/gpulock",
        f"folder {node.root}/state",
        f"file {node.etc}/logrotate.d/gpulock",
        f"file {node.etc}/sysusers.d/gpulock.conf",
        f"file {node.etc}/tmpfiles.d/gpulock.conf",
        f"file {node.etc}/systemd/system/gpulock-exporter.service",
        f"file {node.etc}/systemd/system/gpulock-exporter.socket",
        f"file {node.etc}/systemd/system/gpulockd.service",
        "service gpulock-exporter",
        "service gpulockd",
    ]


def test_a_setting_that_changes_a_unit_starts_that_service_afresh_and_no_other(
    node: SystemdNode,
) -> None:
    node.install()
    node.ctl.told.clear()
    node.set(EXPORTER_LISTEN="127.0.0.1:9999")

    plan = node.install()

    assert [change.what for change in plan.changes] == [
        f"file {node.etc}/systemd/system/gpulock-exporter.socket",
        "service gpulock-exporter",
    ]
    assert plan.changes[1].lines() == [
        "service gpulock-exporter: started afresh",
        f"  ({node.etc}/systemd/system/gpulock-exporter.socket changes)",
    ]
    assert restarts(node) == STARTED[:1]


def test_a_service_that_somebody_stopped_is_started_again(node: SystemdNode) -> None:
    node.install()
    node.ctl.active.discard("gpulockd.service")

    plan = node.install()

    assert [change.lines() for change in plan.changes] == [
        ["service gpulockd", "  - enabled, inactive", "  + enabled, active"]
    ]


def test_a_service_that_is_older_than_its_package_is_started_afresh(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install()
    node.ctl.properties["gpulockd.service"] = {"MainPID": str(os.getpid())}
    path = node.etc / "systemd/system/gpulockd.service"
    service = SystemdService("gpulockd", ("gpulockd.service",), node.ctl)
    started = path.stat().st_mtime

    def start_time(_pid: int) -> float:
        return started

    monkeypatch.setattr(manager, "process_start_time", start_time)
    assert service.restart_reason([path]) == ""

    started -= 3600

    assert service.restart_reason([path]) == f"gpulockd was started before {path} was changed"


def test_a_file_that_changed_within_the_clocks_doubt_is_not_younger(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.touch()
    now = path.stat().st_ctime

    assert first_file_newer([tmp_path / "gone.py", path], now - 1.0) is None
    assert first_file_newer([tmp_path / "gone.py", path], now - 3.0) == path


def test_a_file_of_a_package_is_as_young_as_its_installation(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.touch()
    os.utime(path, (1000, 1000))  # the time of the release

    assert first_file_newer([path], path.stat().st_ctime - 3.0) == path


def test_the_modules_of_both_programs_are_looked_at() -> None:
    names = {
        f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
        for path in package_files("gpulock", "gpulock_exporter")
    }

    assert {
        "gpulock/store/locks.py",
        "gpulock/daemon/app.py",
        "gpulock_exporter/app/program.py",
    } <= names
    assert package_files("no_such_package") == []


def test_systemd_that_has_not_read_a_changed_unit_is_told(node: SystemdNode) -> None:
    node.install()
    node.ctl.properties["gpulockd.service"] = {"NeedDaemonReload": "yes"}
    node.ctl.told.clear()

    plan = node.install()

    assert "gpulockd.service was changed since systemd read it" in plan.changes[0].lines()[1]
    assert node.ctl.told[0] == "daemon-reload"


def test_a_service_that_does_not_start_is_an_error_that_names_its_journal(
    node: SystemdNode,
) -> None:
    node.ctl.fails = "restart"

    with pytest.raises(InstallError, match=r"see journalctl -u gpulock-exporter\.service"):
        node.install()


def test_a_service_that_ends_at_once_is_an_error(node: SystemdNode) -> None:
    node.ctl.dies = True

    with pytest.raises(InstallError, match="service gpulock-exporter is enabled, inactive"):
        node.install()


def test_a_masked_unit_stays_masked(node: SystemdNode) -> None:
    node.install()
    node.ctl.properties["gpulockd.service"] = {"LoadState": "masked"}

    with pytest.raises(InstallError, match=r"masked; systemctl unmask gpulockd\.service"):
        plan_systemd(node.options)


def test_it_refuses_where_systemd_does_not_run(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", node.root / "nowhere")

    with pytest.raises(InstallError, match="systemd does not run here"):
        plan_systemd(node.options)


def test_it_refuses_a_simulated_node(node: SystemdNode) -> None:
    node.set(SIMULATION=str(driver(node.root.parent) / "simulation"))

    with pytest.raises(InstallError, match="simulated"):
        plan_systemd(node.options)


def test_without_a_driver_it_goes_by_the_settings_and_says_so(node: SystemdNode) -> None:
    node.config.write_text(node.config.read_text().replace("/proc/driver", "/none"))
    node.set(EXPECTED_GPUS="3")

    plan = node.install()

    assert "/dev/nvidia2 rw" in node.unit("gpulock-exporter.service")
    assert "/dev/nvidia3" not in node.unit("gpulock-exporter.service")
    driver, policy = plan.notes
    assert "once the driver is loaded" in driver
    assert "QUARANTINE_ON" in policy


# --- uninstall ----------------------------------------------------------------------------------


def test_uninstall_stops_both_and_removes_their_files(node: SystemdNode) -> None:
    own = node.etc / "systemd/system/gpulockd.service.d/site.conf"
    own.parent.mkdir(parents=True)
    own.write_text("# the site's\n")
    before = files(node)
    node.install()

    assert SystemdUninstaller(node.config, ignore, node.ctl).uninstall() == []

    assert files(node) == before
    assert (node.ctl.active, node.ctl.enabled) == (set(), set())
    assert node.ctl.told[-1] == "daemon-reload"
    assert not (node.root / "state/install").exists()
    assert SystemdUninstaller(node.config, ignore, node.ctl).uninstall() == []


def test_uninstall_leaves_a_unit_that_somebody_changed_and_locks(node: SystemdNode) -> None:
    node.install()
    (node.root / "run/gpulock/locks/0000:06:00.0").mkdir(parents=True)
    path = node.etc / "systemd/system/gpulockd.service"
    path.write_text("changed\n")

    left = SystemdUninstaller(node.config, ignore, node.ctl).uninstall()

    assert left == [f"file {path} was changed since gpulock wrote it: rm {path}"]
    assert path.exists()
    assert (node.root / "run/gpulock/locks/0000:06:00.0").is_dir()
    assert node.ctl.active == set()


def test_uninstall_says_what_stays(node: SystemdNode) -> None:
    node.install()
    said: list[str] = []

    SystemdUninstaller(node.config, said.append, node.ctl).uninstall()

    assert "stopped and disabled: gpulockd" in said
    assert said[-2:] == [
        "user gpulock-exporter stays",
        f"{node.config}, locks and history stay",
    ]


# --- how it is typed ----------------------------------------------------------------------------


def call(node: SystemdNode, *words: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(node.config), *words])


def test_the_command_refuses_in_one_line_where_systemd_does_not_run(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", node.root / "nowhere")

    done = call(node, "install", "systemd", "--dry-run")

    assert done.exit_code == 1
    assert "start gpulockd and gpulock-exporter yourself" in done.stderr


def test_uninstall_where_nothing_is_installed_says_so(node: SystemdNode) -> None:
    done = call(node, "uninstall", "systemd")

    assert (done.exit_code, done.output) == (0, "nothing to do: systemd is not installed here\n")


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ({"LoadState": "not-found"}, None),
        ({"LoadState": "masked", "UnitFileState": "masked"}, "masked"),
        ({"LoadState": "loaded", "UnitFileState": "masked-runtime"}, "masked"),
        ({"LoadState": "loaded", "UnitFileState": "enabled", "ActiveState": "active"}, ON),
        ({"LoadState": "loaded", "UnitFileState": "", "ActiveState": "failed"}, "disabled, failed"),
    ],
)
def test_the_state_of_a_unit_is_two_words(seen: dict[str, str], state: str | None) -> None:
    assert unit_state(seen) == state
