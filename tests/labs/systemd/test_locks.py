# SPDX-License-Identifier: Apache-2.0
"""Locks outlive the services: an installation, each stop and upgrade, a boot, the end.

The machine has eight simulated cards that a double of NVML tells of; a job is `gpulock run` in a
unit of its own.
"""

from __future__ import annotations

import pytest

from gpulock.install.systemd.install import RESTART
from gpulock.install.systemd.units import DAEMON, EXPORTER, SOCKET
from tests.labs.systemd.gpulock import OPT, Node, Package
from tests.labs.systemd.machine import Machine
from tests.labs.systemd.services import records, show
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


def test_installed_means_started_enabled_and_approved_by_doctor(node: Node) -> None:
    for unit in (DAEMON, EXPORTER, SOCKET):
        assert show(node, unit, "ActiveState") == "active"
        assert show(node, unit, "UnitFileState") == "enabled"
    assert "nothing to change" in node.gpulock("install", "systemd")
    node.wait_metric("gpulock_nvml_up", 1)  # it has only just begun
    seen = node.gpulock("doctor", "--all").splitlines()
    assert {"ok services", "ok gpulockd", "ok exporter"} <= {*seen}


def capabilities(status: str, which: str) -> list[int]:
    """Return the numbers of the capabilities that a process has."""
    mask = int(status.partition(f"{which}:")[2].split()[0], 16)
    return [bit for bit in range(64) if mask >> bit & 1]


def test_what_the_services_run_as_and_what_an_idle_command_gets_to_send_mail(node: Node) -> None:
    def status(unit: str) -> str:
        return node.machine.run("cat", f"/proc/{node.main_pid(unit)}/status").stdout

    daemon, exporter = status(DAEMON), status(EXPORTER)
    user = node.machine.run("id", "-u", "gpulock-exporter").stdout.strip()
    assert "Uid:\t0\t0" in daemon and f"Uid:\t{user}\t{user}" in exporter
    assert 0 < int(user) < 1000  # the last guard takes no other user's program for a service
    assert "NoNewPrivs:\t1" in daemon and "NoNewPrivs:\t1" in exporter
    assert "Seccomp:\t2" in daemon and "Seccomp:\t2" in exporter
    assert capabilities(daemon, "CapEff") == [1, 2, 5, 6, 19, 34]
    assert capabilities(exporter, "CapEff") == capabilities(exporter, "CapBnd") == []

    node.configure(IDLE_COMMAND="/bin/true")
    node.gpulock("install", "systemd")
    mailing = status(DAEMON)
    node.configure()
    node.gpulock("install", "systemd")
    assert "NoNewPrivs:\t0" in mailing
    assert capabilities(mailing, "CapBnd") == [1, 2, 5, 6, 7, 19, 34]


def test_locks_survive_restart_stop_reload_and_every_clean_up(node: Node) -> None:
    held = records(node.claim(3))
    run = node.machine.run

    for command in (
        # Not at once: a daemon that is being started has the old socket open until its exec.
        ("systemctl", "restart", SOCKET, EXPORTER),
        ("systemctl", "restart", DAEMON),
        ("systemctl", "daemon-reload"),
        ("systemctl", "daemon-reexec"),
        ("systemctl", "stop", DAEMON, SOCKET, EXPORTER),
        ("systemd-tmpfiles", "--create", "--clean", "--remove"),
        ("systemctl", "start", DAEMON, SOCKET, EXPORTER),
    ):
        run(*command)
        assert records(node.locks()) == held, command
    assert show(node, "job", "ActiveState") == "active"


def test_a_lock_dir_that_was_lost_is_made_again_with_the_locks_of_who_lives(node: Node) -> None:
    held = sorted(node.claim(2))

    pid = str(node.main_pid(DAEMON))
    node.machine.run("kill", "-STOP", pid)  # else it would put them back beneath rm's feet
    stat = ("cat", f"/proc/{pid}/stat")
    wait_until(lambda: ") T " in node.machine.run(*stat).stdout, why="gpulockd to be stopped")
    node.machine.run("rm", "-rf", "/run/gpulock")
    node.machine.run("kill", "-CONT", pid)

    wait_until(lambda: sorted(node.locks()) == held, why="the locks to be put back")
    assert show(node, DAEMON, "NRestarts") == "0"


def test_tmpfiles_makes_the_folders_again_after_a_boot(node: Node) -> None:
    run = node.machine.run
    run("systemctl", "stop", DAEMON, SOCKET, EXPORTER)
    run("rm", "-rf", "/run/gpulock", "/run/gpulock.claims", "/run/gpulock-exporter")
    run("rm", "/var/lib/gpulock/boot_id")

    run("systemd-tmpfiles", "--create", "--boot")
    for folder in ("/run/gpulock", "/run/gpulock.claims"):
        assert run("stat", "-c", "%U %a", folder).stdout == "root 755\n"
    run("systemctl", "start", DAEMON, SOCKET, EXPORTER)

    assert run("stat", "-c", "%U %a", "/run/gpulock-exporter").stdout == "gpulock-exporter 755\n"


INSTALL_HOOKS = """
from gpulock.install.items import Wanted
from gpulock.install.versions import SGE, Hooks, list_hook_versions
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
hooks = Hooks(read_settings(DEFAULT_PATH), SGE)
hooks.write(Wanted.PRESENT)
print(hooks.read(), *list_hook_versions(hooks.folder))
"""


def install_hooks(node: Node) -> tuple[str, list[str]]:
    """Put the package's hooks in force; return the version, and all that are there."""
    current, *there = node.machine.run(f"{OPT}/bin/python3", "-c", INSTALL_HOOKS).stdout.split()
    return current, there


def test_locks_survive_an_upgrade_of_the_package_and_hooks_that_run_keep_their_version(
    node: Node,
) -> None:
    first, _ = install_hooks(node)
    held = records(node.claim(2))
    module = node.package.modules / "gpulock/__init__.py"
    text = module.read_text()
    try:
        module.write_text(text.replace('__version__ = "', '__version__ = "9.'))
        second, there = install_hooks(node)
        assert second.startswith("9.") and {first, second} <= {*there}

        assert RESTART in node.gpulock("install", "systemd")
        node.machine.run(*RESTART.split())

        assert 'version="9.' in wait_until(node.scrape, why="a scrape")
        assert records(node.locks()) == held
        node.machine.run("systemctl", "kill", "--signal=KILL", "job")
        wait_until(lambda: not node.locks(), why="the new gpulockd to free them")
    finally:
        module.write_text(text)
        node.machine.run("rm", "-rf", "/usr/lib/gpulock/hooks")


def test_uninstall_removes_everything_but_locks_history_and_user(package: Package) -> None:
    with_services = Machine(binds=package.binds, lab="/tmp/gpulock-lab-uninstalled")
    with_services.up()
    try:
        node = Node(with_services, package)
        node.prepare()
        before = etc(with_services)
        node.gpulock("install", "systemd")
        held = records(node.claim(2))
        assert etc(with_services) != before

        never = f"/run/systemd/system/{DAEMON}.d/never.conf"
        with_services.write(never, "[Service]\nRestart=no\n")
        with_services.run("systemctl", "daemon-reload")
        with_services.run("systemctl", "kill", "--signal=KILL", DAEMON)
        wait_until(lambda: show(node, DAEMON, "ActiveState") == "failed", why="gpulockd to fail")

        node.gpulock("uninstall", "systemd")

        assert etc(with_services) == before
        for unit in (DAEMON, EXPORTER, SOCKET):
            assert show(node, unit, "LoadState") == "not-found"
            assert show(node, unit, "ActiveState") == "inactive"
        assert records(node.locks()) == held
        assert with_services.run("systemctl", "is-system-running").stdout == "running\n"
        assert "gpulock" not in with_services.run("systemctl", "list-unit-files").stdout
    finally:
        with_services.down()


def etc(machine: Machine) -> dict[str, str]:
    """Return what an installation could change, links and folders included."""
    places = "etc/systemd/system etc/tmpfiles.d etc/sysusers.d usr/local/lib/systemd"
    find = (
        "bash",
        "-c",
        f"cd / && find {places} -mindepth 1 2>/dev/null | grep -v systemd/system$ | sort",
    )
    names = machine.run(*find).stdout.split()
    shown = machine.run("bash", "-c", f"cd / && cat {' '.join(names)} 2>/dev/null || true")
    return {"names": " ".join(names), "text": shown.stdout}
