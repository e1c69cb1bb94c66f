# SPDX-License-Identifier: Apache-2.0
"""`gpulock install systemd` and `uninstall systemd`, with a systemctl that only keeps states."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.daemon.core import own_program
from gpulock.install.files import InstallError
from gpulock.install.systemd import install
from gpulock.install.systemd.install import ON, Services, SystemdInstaller, unit_state
from gpulock.install.systemd.units import DAEMON, EXPORTER, SOCKET, UNITS
from tests.support.systemd_site import SystemdNode, driver, make_systemd_node

Plant = Callable[[SystemdNode], None]
STARTED = ["restart gpulock-exporter.socket gpulock-exporter.service gpulockd.service"]
REAL_PROGRAM = install.run_systemd_program
DROP_IN = "etc/systemd/system/{}.d/10-gpulock.conf"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemdNode:
    return make_systemd_node(tmp_path, monkeypatch)


def files(node: SystemdNode) -> dict[str, str]:
    found = [*node.etc.rglob("*"), *(node.root / "usr").rglob("*")]
    return {str(path.relative_to(node.root)): path.read_text() for path in found if path.is_file()}


def restarts(node: SystemdNode) -> list[str]:
    return [line for line in node.ctl.told if line.startswith("restart")]


def test_both_services_are_installed_enabled_and_started_the_socket_first(
    node: SystemdNode,
) -> None:
    """After user and folders were made, by programs of systemd's."""
    with pytest.raises(InstallError, match=r"ended with 3: no such unit$"):
        REAL_PROGRAM("sh", "-c", "echo no such unit >&2; exit 3")
    node.install()

    assert {*files(node)} == {
        "etc/gpulock/gpulock.conf",
        *(f"usr/local/lib/systemd/system/{unit}" for unit in UNITS),
        *(DROP_IN.format(unit) for unit in (DAEMON, EXPORTER)),
        "etc/tmpfiles.d/gpulock.conf",
        "etc/sysusers.d/gpulock.conf",
    }
    made = ["systemd-sysusers gpulock.conf", "systemd-tmpfiles --create gpulock.conf"]
    assert [one for one in node.ctl.told if not one.startswith("stop")][:2] == made
    assert restarts(node) == STARTED
    assert (node.differences(), node.install().changed) == ({}, [])
    installer = SystemdInstaller(node.config)
    installer.parts()
    assert installer.notes == [
        f"after an upgrade of gpulock, or a change of settings: {install.RESTART}"
    ]
    assert {*install.unit_states().values()} == {ON}
    assert "ProtectControlGroups=no" not in node.drop_in(DAEMON)
    mark = node.root / "run/gpulock.claims/isolation"  # what was confined is to be cleared away
    mark.parent.mkdir(parents=True)
    mark.touch()
    node.install()
    assert "\nProtectControlGroups=no\n" in node.drop_in(DAEMON)


def test_of_a_package_only_the_drop_ins_are_written_and_what_runs_is_started_afresh(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody enabled the package's units."""
    monkeypatch.setattr(own_program, "PACKAGE", own_program.library_folder())
    node.give_package_units()
    for verb in ("daemon-reload", "enable", "restart"):
        node.ctl("systemctl", verb, *UNITS)
    node.ctl.told.clear()
    before = files(node)

    node.install()
    assert (restarts(node), node.differences()) == (STARTED, {})
    added = files(node).keys() - before.keys()
    node.uninstall()

    assert added == {DROP_IN.format(unit) for unit in (DAEMON, EXPORTER)}
    assert (files(node), node.ctl.units("active")) == (before, set())


def test_a_setting_that_changes_a_unit_starts_the_services_afresh(node: SystemdNode) -> None:
    node.install()
    node.ctl.told.clear()
    node.set(EXPORTER_LISTEN="127.0.0.1:9999", ISOLATION="cgroup")
    paths = [install.drop_in_path(unit) for unit in (SOCKET, DAEMON)]

    shown = node.differences()

    assert [*shown] == [f"file {path}" for path in paths]
    assert node.install().changed == [*shown, Services.title]
    assert restarts(node) == STARTED


def test_what_cannot_be_started_is_started_by_the_next_run(node: SystemdNode) -> None:
    node.install()
    node.set(EXPORTER_LISTEN="127.0.0.1:9999")
    node.ctl.fails = "restart"
    with pytest.raises(InstallError):
        node.install()
    node.ctl.fails = ""

    assert node.install().changed == [Services.title]


def fails(node: SystemdNode) -> None:
    node.ctl.fails = "restart"


def dies(node: SystemdNode) -> None:
    node.ctl.dies = True


def is_masked(node: SystemdNode) -> None:
    node.install()
    node.ctl.properties[DAEMON] = {"LoadState": "masked"}


def is_simulated(node: SystemdNode) -> None:
    node.set(SIMULATION=str(driver(node.root.parent) / "simulation"))


def has_no_systemd(_: SystemdNode) -> None:
    install.BOOTED.rmdir()


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (fails, r"see journalctl -u gpulock-exporter\.service -u gpulockd\.service"),
        (
            dies,
            r"and gpulock-exporter: .*\(gpulock-exporter\.socket: enabled, inactive -> enabled, a",
        ),
        (is_masked, r"\(gpulockd\.service: masked -> enabled, active"),
        (is_simulated, "simulated"),
        (has_no_systemd, "systemd does not run here"),
    ],
)
def test_what_keeps_a_service_from_running_is_told(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch, plant: Plant, says: str
) -> None:
    (node.root / "booted").mkdir()
    monkeypatch.setattr(install, "BOOTED", node.root / "booted")
    plant(node)

    with pytest.raises(InstallError, match=says):
        node.install()


def test_what_services_do_not_see_is_refused_also_where_a_link_leads_there(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the environment of a user's own Python has one."""
    hidden, link = node.root / "home/python3", node.root / "python3"
    link.symlink_to(hidden)
    monkeypatch.setattr(install, "_HIDDEN", (f"{node.root}/home/",))
    assert node.parts()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(link))
        with pytest.raises(InstallError, match=f"{hidden} is in a folder that services do not see"):
            node.parts()
    monkeypatch.setattr(install, "PACKAGE", hidden)
    with pytest.raises(InstallError, match=f"{hidden} is in .*; install gpulock into"):
        node.parts()


# --- uninstall ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_systemd", [True, False])
def test_uninstall_stops_both_and_removes_their_files(
    node: SystemdNode, monkeypatch: pytest.MonkeyPatch, has_systemd: bool
) -> None:
    own = node.etc / "systemd/system/gpulockd.service.d/site.conf"
    own.parent.mkdir(parents=True)
    own.write_text("# the site's\n")
    before = files(node)
    node.install()
    (node.root / "run/gpulock/locks/0000:06:00.0").mkdir(parents=True)
    node.ctl.mark("failed", DAEMON, "[Unit]")
    if not has_systemd:
        monkeypatch.setattr(install, "BOOTED", node.root / "nowhere")

    node.uninstall()

    assert files(node) == before
    for state in ("active", "enabled", "failed") if has_systemd else ():
        assert node.ctl.units(state) == set()
    assert (node.root / "run/gpulock/locks/0000:06:00.0").is_dir()
    assert not (node.etc / "systemd/system/gpulock-exporter.socket.d").exists()
    assert node.uninstall().changed == []


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
