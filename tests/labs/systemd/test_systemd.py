# SPDX-License-Identifier: Apache-2.0
"""Both services under a real systemd, with cgroup v2 alone and with v1 beside it.

The machine has eight simulated cards that a double of NVML tells of; a job is `gpulock run` in a
unit of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gpulock.store.owner import Owner
from tests.labs.common.frozen_thread import frozen
from tests.labs.systemd.gpulock import GPUS, OPT, Node, Package, make_package
from tests.labs.systemd.machine import Machine
from tests.nvml.double import Process
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab

DAEMON, EXPORTER = "gpulockd.service", "gpulock-exporter.service"
SOCKET = "gpulock-exporter.socket"
NOBODY = 65534
# Opens device nodes for reading and writing, as the user and in the sandbox that it runs in.
PROBE = """
import errno, os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        said = "OPEN"
    except OSError as fault:
        said = errno.errorcode[fault.errno]
    print(path, said)
"""

# What is known of a reset: who calls it, what it may open, and who else has the driver open.
SMI = f"""#!/bin/sh
exec >/run/smi
echo "$@"
{OPT}/bin/python3 /srv/probe.py /dev/nvidia3 /dev/nvidiactl
grep CapEff /proc/self/status
grep -lsa [g]pulock_exporter.worker.process /proc/[0-9]*/cmdline | wc -l
"""
XID, SYS_ADMIN = 79, 21


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return make_package(tmp_path_factory.mktemp("gpulock"))


@pytest.fixture(scope="module", params=["hybrid", "unified"])
def installed(request: pytest.FixtureRequest, package: Package) -> Iterator[Node]:
    machine = Machine(str(request.param), binds=package.binds)
    machine.up()
    try:
        node = Node(machine, package)
        node.prepare()
        node.gpulock("install", "systemd")
        yield node
    finally:
        machine.down()


@pytest.fixture
def node(installed: Node) -> Iterator[Node]:
    """Give a test both services, freshly started; none of its changes stays."""
    yield installed
    installed.prepare_again()


def show(node: Node, unit: str, name: str) -> str:
    return node.machine.show(unit, name)


def journal(node: Node, unit: str) -> str:
    return "\n".join(node.machine.journal(unit))


def wait_journal(node: Node, unit: str, words: str) -> None:
    wait_until(lambda: words in journal(node, unit), why=f"{words!r} in the journal")


def wait_ended(node: Node, unit: str) -> None:
    """Wait until none of a unit's processes is left; it is `deactivating` before."""
    wait_until(
        lambda: show(node, unit, "ActiveState") in ("inactive", "failed"), why=f"the end of {unit}"
    )


def wait_sleeps(node: Node, unit: str) -> int:
    """Wait until a unit's process has become its user's and sleeps; return it."""
    pid = node.main_pid(unit)
    name = ("cat", f"/proc/{pid}/comm")
    wait_until(lambda: node.machine.run(*name).stdout == "sleep\n", why=f"{unit} to be himself")
    return pid


def records(locks: dict[str, Owner]) -> dict[str, str]:
    return {name: record.token for name, record in locks.items()}


# --- installation -------------------------------------------------------------------------------


def test_installed_means_started_enabled_and_approved_by_doctor(node: Node) -> None:
    for unit in (DAEMON, EXPORTER, SOCKET):
        assert show(node, unit, "ActiveState") == "active"
        assert show(node, unit, "UnitFileState") == "enabled"
    assert "nothing to change" in node.gpulock("install", "systemd")
    node.wait_metric("gpulock_nvml_up", 1)  # it has only just begun
    seen = node.gpulock("doctor")
    assert "✓ units" in seen and "✓ gpulockd" in seen and "✓ gpulock-exporter" in seen


def test_what_the_services_run_as(node: Node) -> None:
    run = node.machine.run
    daemon = run("cat", f"/proc/{node.main_pid(DAEMON)}/status").stdout
    exporter = run("cat", f"/proc/{node.main_pid(EXPORTER)}/status").stdout
    user = run("id", "-u", "gpulock-exporter").stdout.strip()

    assert "Uid:\t0\t0" in daemon and f"Uid:\t{user}\t{user}" in exporter
    assert 0 < int(user) < 1000  # the last guard takes no other user's program for a service
    assert "NoNewPrivs:\t1" in daemon and "NoNewPrivs:\t1" in exporter
    assert "Seccomp:\t2" in daemon and "Seccomp:\t2" in exporter
    effective = int(daemon.partition("CapEff:")[2].split()[0], 16)
    assert [bit for bit in range(64) if effective >> bit & 1] == [1, 2, 5, 19]
    assert "CapEff:\t0000000000000000" in exporter and "CapBnd:\t0000000000000000" in exporter


def test_a_changed_setting_is_a_changed_unit_that_doctor_names(node: Node) -> None:
    node.configure(EXPORTER_LISTEN="127.0.0.1:9777")

    assert "gpulock-exporter.socket\n    run gpulock install systemd again" in node.gpulock(
        "doctor"
    )

    done = node.gpulock("install", "systemd")
    assert "service gpulock-exporter: started afresh" in done
    assert "service gpulockd" not in done
    assert "gpulock-exporter is healthy" in node.scrape("/-/healthy", 9777)
    node.configure()
    node.gpulock("install", "systemd")
    assert "gpulock-exporter is healthy" in node.scrape("/-/healthy")


# --- gpulockd -----------------------------------------------------------------------------------


def test_gpulockd_is_ready_once_the_first_reconcile_is_done(node: Node) -> None:
    node.machine.run("systemctl", "stop", DAEMON)
    node.machine.run("rm", "-f", "/run/gpulock/verdicts")

    node.machine.run("systemctl", "start", DAEMON)

    assert node.machine.path("/run/gpulock/verdicts").exists()
    assert show(node, DAEMON, "StatusText") == f"0 of {GPUS} devices held"
    node.claim(2)
    wait_until(
        lambda: show(node, DAEMON, "StatusText") == f"2 of {GPUS} devices held",
        why=lambda: "the status to follow\n" + show(node, DAEMON, "StatusText"),
    )


def test_what_a_killed_job_held_is_freed_and_the_journal_says_why(node: Node) -> None:
    held = node.claim(2)

    node.machine.run("systemctl", "kill", "--signal=KILL", "job")

    wait_until(lambda: not node.locks(), why="the devices to be free")
    wait_journal(node, DAEMON, f"freed {' '.join(sorted(held))}")
    lines = node.machine.run(
        "journalctl", "-u", DAEMON, "-p", "notice", "-o", "short", "--no-pager"
    ).stdout.splitlines()
    line = next(line for line in reversed(lines) if "freed" in line)
    assert f"gpulockd[{node.main_pid(DAEMON)}]: freed" in line  # no <5> left of the priority
    assert "is gone" in line
    history = node.machine.path("/var/lib/gpulock/history/history.jsonl")
    wait_until(
        lambda: history.exists() and next(iter(held.values())).token in history.read_text(),
        why="its line in the history",
    )


def test_a_daemon_that_hangs_is_killed_and_started_again_and_says_where_it_hung(
    node: Node,
) -> None:
    held = records(node.claim(2))
    node.reload(DAEMON, "WatchdogSec=8", "RestartSec=100ms")
    first = node.main_pid(DAEMON)

    node.machine.run("kill", "-STOP", str(first))

    wait_until(
        lambda: (
            node.main_pid(DAEMON) not in (0, first)
            and show(node, DAEMON, "ActiveState") == "active"
        ),
        why="another gpulockd",
    )
    assert show(node, DAEMON, "NRestarts") == "1"
    for words in ("Watchdog timeout (limit 8s)!", "Fatal Python error: Aborted", "main_loop.py"):
        wait_journal(node, DAEMON, words)
    assert records(node.locks()) == held


def test_the_watchdog_does_not_end_a_daemon_whose_loop_runs(node: Node) -> None:
    node.reload(DAEMON, "WatchdogSec=6")
    first = node.main_pid(DAEMON)
    began = int(show(node, DAEMON, "WatchdogTimestampMonotonic"))

    wait_until(
        lambda: int(show(node, DAEMON, "WatchdogTimestampMonotonic")) > began + 18_000_000,
        why="three limits of the watchdog to pass",
    )

    assert (node.main_pid(DAEMON), show(node, DAEMON, "NRestarts")) == (first, "0")


def test_a_daemon_that_dies_is_started_again(node: Node) -> None:
    held = records(node.claim(1))
    node.reload(DAEMON, "RestartSec=100ms")
    first = node.main_pid(DAEMON)

    node.machine.run("kill", "-KILL", str(first))

    wait_until(lambda: node.main_pid(DAEMON) not in (0, first), why="another gpulockd")
    assert records(node.locks()) == held


def test_a_reload_reads_the_settings_and_bad_ones_change_nothing(node: Node) -> None:
    first = node.main_pid(DAEMON)
    node.configure(EXPECTED_GPUS="7")

    node.machine.run("systemctl", "reload", DAEMON)
    wait_journal(node, DAEMON, "the settings were read again")
    node.configure(NONSENSE="1", GATE_TIMEOUT="soon")
    node.machine.run("systemctl", "reload", DAEMON)

    wait_journal(node, DAEMON, "the settings obeyed last stay in force")
    node.machine.run("systemctl", "restart", DAEMON)
    first = node.main_pid(DAEMON)
    node.configure(NONSENSE="1")
    node.machine.run("systemctl", "reload", DAEMON)

    wait_journal(node, DAEMON, "unknown key 'NONSENSE'")
    assert (node.main_pid(DAEMON), show(node, DAEMON, "ActiveState")) == (first, "active")


def test_users_of_a_workstation_are_served_from_within_the_units_sandbox(node: Node) -> None:
    node.configure(USER_CLAIMS="yes")
    node.machine.run("systemctl", "reload", DAEMON)
    wait_until(node.machine.path("/run/gpulock/socket").exists, why="the socket")

    held = node.claim(2, uid=NOBODY)

    assert {record.uid for record in held.values()} == {NOBODY}
    node.machine.run("systemctl", "stop", "job")
    wait_until(lambda: not node.locks(), why="the devices to be free")


def test_a_sites_idle_command_is_given_what_sending_mail_takes(node: Node) -> None:
    node.configure(IDLE_COMMAND="/bin/true")
    node.gpulock("install", "systemd")

    status = node.machine.run("cat", f"/proc/{node.main_pid(DAEMON)}/status").stdout
    node.configure()
    node.gpulock("install", "systemd")

    assert "NoNewPrivs:\t0" in status
    bounds = int(status.partition("CapBnd:")[2].split()[0], 16)
    assert [bit for bit in range(64) if bounds >> bit & 1] == [1, 2, 5, 6, 7, 19]


def test_only_one_gpulockd_runs(node: Node) -> None:
    done = node.machine.run(f"{OPT}/bin/gpulockd", check=False)

    assert done.returncode == 1
    assert f"gpulockd runs already, pid {node.main_pid(DAEMON)}" in done.stderr


def test_without_sight_the_daemon_says_so_and_frees_nothing_and_doctor_finds_the_drop_in(
    node: Node,
) -> None:
    blind = ["CapabilityBoundingSet=", "CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_KILL"]
    node.reload(DAEMON, *blind)
    wait_journal(node, DAEMON, "without CAP_SYS_PTRACE")
    node.claim(2)
    # somebody else's process: root's own could be seen without that capability
    node.machine.run("systemd-run", "--quiet", "--unit=job-other", "--uid=65534", "sleep", "600")
    wait_sleeps(node, "job-other")

    node.machine.run("systemctl", "kill", "--signal=KILL", "job")
    wait_ended(node, "job")
    node.machine.run("systemctl", "reload", DAEMON)

    assert len(node.locks()) == 2
    seen = node.gpulock("doctor", check=False)
    assert "✗ gpulockd.service: CapabilityBoundingSet=" in seen
    assert f"look at /etc/systemd/system/{DAEMON}.d/test.conf" in seen


def opened_from_a_session(node: Node) -> str:
    """Return what becomes of opening a card from below user.slice, where logins are."""
    line = ["systemd-run", "--quiet", "--pipe", "--wait", "--slice=user.slice", "--uid=65534"]
    done = node.machine.run(*line, f"{OPT}/bin/python3", "-c", PROBE, "/dev/nvidia0")
    return done.stdout.split()[1]


def test_isolation_is_looked_after_and_cleared_away_from_within_the_units_sandbox(
    node: Node,
) -> None:
    node.machine.run("systemctl", "start", "user.slice")
    assert opened_from_a_session(node) == "ENXIO"  # allowed: there is no driver behind it
    node.machine.run("touch", "/run/gpulock/isolation")  # a job was confined in this boot

    node.configure(ISOLATION="cgroup", SYS_ROOT="/sys")
    node.gpulock("install", "systemd")
    assert opened_from_a_session(node) == "EPERM"
    node.configure(SYS_ROOT="/sys")
    node.gpulock("install", "systemd")
    node.machine.run("systemctl", "restart", DAEMON)

    assert opened_from_a_session(node) == "ENXIO"
    wait_until(
        lambda: not node.machine.path("/run/gpulock/isolation").exists(), why="the mark to go"
    )
    assert "isolation:" not in journal(node, DAEMON)
    node.configure()
    node.gpulock("install", "systemd")
    assert show(node, DAEMON, "ProtectControlGroups") == "yes"


def test_a_gpu_is_reset_from_within_the_units_sandbox(node: Node) -> None:
    run = node.machine.run
    node.machine.write("/srv/probe.py", PROBE)
    node.machine.write("/srv/nvidia-smi", SMI)
    run("chmod", "755", "/srv/nvidia-smi")
    node.configure(QUARANTINE_RESET="yes", NVIDIA_SMI="/srv/nvidia-smi")
    assert "QUARANTINE_RESET does not work without" in node.gpulock("doctor")
    node.gpulock("install", "systemd")
    assert "QUARANTINE_RESET" not in node.gpulock("doctor")
    node.wait_metric("gpulock_nvml_up", 1)

    node.package.double.event(3, XID)
    node.package.point()
    wait_journal(node, DAEMON, "was reset (1 of 3)")

    words, *paths, effective, at_work = run("cat", "/run/smi").stdout.splitlines()
    assert words.startswith("--gpu-reset -i 0000:")
    # allowed: there is no driver behind them
    assert paths == ["/dev/nvidia3 ENXIO", "/dev/nvidiactl ENXIO"]
    assert int(effective.split()[1], 16) >> SYS_ADMIN & 1
    assert at_work == "0", "the exporter makes way"
    node.configure()
    node.gpulock("install", "systemd")
    node.gpulock("restore", "3", check=False)


# --- locks outlive services -----------------------------------------------------------------------


def test_locks_survive_restart_stop_reload_and_every_clean_up(node: Node) -> None:
    held = records(node.claim(3))
    run = node.machine.run

    for command in (
        ("systemctl", "restart", DAEMON, SOCKET, EXPORTER),
        ("systemctl", "daemon-reload"),
        ("systemctl", "daemon-reexec"),
        ("systemctl", "stop", DAEMON, SOCKET, EXPORTER),
        ("systemd-tmpfiles", "--create", "--clean", "--remove"),
        ("systemctl", "start", DAEMON, SOCKET, EXPORTER),
    ):
        run(*command)
        assert records(node.locks()) == held, command
    assert show(node, "job", "ActiveState") == "active"


def test_daemon_reload_disturbs_neither_service(node: Node) -> None:
    before = [node.main_pid(unit) for unit in (DAEMON, EXPORTER)]

    node.machine.run("systemctl", "daemon-reload")

    assert [node.main_pid(unit) for unit in (DAEMON, EXPORTER)] == before
    node.wait_metric("gpulock_nvml_up", 1)


def test_hooks_need_no_daemon(node: Node) -> None:
    node.machine.run("systemctl", "stop", DAEMON)
    assert show(node, DAEMON, "Result") == "success"
    node.claim(GPUS)
    node.machine.run("systemctl", "kill", "--signal=KILL", "job")
    wait_ended(node, "job")

    again = node.claim(GPUS, "job2")  # the claim itself proves the owner dead

    assert len(again) == GPUS
    assert show(node, DAEMON, "ActiveState") == "inactive"


def test_a_lock_dir_that_was_lost_is_made_again_with_the_locks_of_who_lives(node: Node) -> None:
    held = sorted(node.claim(2))

    pid = str(node.main_pid(DAEMON))
    node.machine.run("kill", "-STOP", pid)  # else it would put them back beneath rm's feet
    stat = ("cat", f"/proc/{pid}/stat")
    wait_until(lambda: ") T " in node.machine.run(*stat).stdout, why="gpulockd to be stopped")
    node.machine.run("rm", "-rf", "/run/gpulock")
    node.machine.run("kill", "-CONT", pid)

    wait_until(lambda: sorted(node.locks()) == held, why="the locks to be adopted")
    assert show(node, DAEMON, "NRestarts") == "0"


def test_tmpfiles_makes_the_folders_again_after_a_boot(node: Node) -> None:
    run = node.machine.run
    run("systemctl", "stop", DAEMON, SOCKET, EXPORTER)
    run("rm", "-rf", "/run/gpulock", "/run/gpulock-exporter", "/var/lib/gpulock/boot_id")

    run("systemd-tmpfiles", "--create", "--boot")
    assert run("stat", "-c", "%U %a", "/run/gpulock").stdout == "root 755\n"
    run("systemctl", "start", DAEMON, SOCKET, EXPORTER)

    assert run("stat", "-c", "%U %a", "/run/gpulock-exporter").stdout == "gpulock-exporter 755\n"


INSTALL_HOOKS = """
import sys
from pathlib import Path
from gpulock.install.versions import InstalledHooks, list_hook_versions
prefix, config = Path("/usr/local/libexec/gpulock"), Path("/etc/gpulock/gpulock.conf")
hooks = InstalledHooks(prefix, config, sys.executable)
hooks.write(hooks.wanted())
print(hooks.read(), *list_hook_versions(hooks.prefix))
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
        os.utime(module, (time.time() + 4, time.time() + 4))  # beyond the doubt of a start's time
        second, there = install_hooks(node)
        assert second.startswith("9.") and {first, second} <= {*there}
        assert f"gpulockd was started before {OPT}" in node.gpulock("doctor", check=False)

        done = node.gpulock("install", "systemd")

        assert "service gpulockd: started afresh" in done
        assert "service gpulock-exporter: started afresh" in done
        assert 'version="9.' in wait_until(lambda: node.scrape() or None, why="a scrape")
        assert records(node.locks()) == held
        node.machine.run("systemctl", "kill", "--signal=KILL", "job")
        wait_until(lambda: not node.locks(), why="the new gpulockd to free them")
    finally:
        module.write_text(text)
        node.machine.run("rm", "-rf", "/usr/local/libexec/gpulock")


# --- the exporter -------------------------------------------------------------------------------


def test_the_first_scrape_starts_the_exporter_through_its_socket(node: Node) -> None:
    node.machine.run("systemctl", "stop", EXPORTER)
    assert show(node, EXPORTER, "ActiveState") == "inactive"
    assert show(node, SOCKET, "ActiveState") == "active"

    assert "gpulock-exporter is healthy" in node.scrape("/-/healthy")

    wait_until(lambda: show(node, EXPORTER, "ActiveState") == "active", why="systemd to know")
    node.wait_metric("gpulock_nvml_up", 1)
    assert "ListenStream" not in journal(node, EXPORTER)


def test_no_scrape_is_refused_while_the_exporter_starts_afresh(node: Node) -> None:
    for _ in range(3):
        node.machine.run("systemctl", "restart", "--no-block", EXPORTER)
        assert "gpulock-exporter is healthy" in node.scrape("/-/healthy")


def test_its_own_user_sees_cards_locks_and_jobs(node: Node) -> None:
    held = node.claim(2)

    node.wait_metric('gpulock_gpus{state="held"}', 2)

    seen = wait_until(
        lambda: (
            text if (text := node.scrape()).count("\ngpulock_gpu_power_watts{") == GPUS else None
        ),
        why=lambda: f"a scrape with every card\n{node.scrape()}",
    )
    pid = next(iter(held.values())).pid
    assert seen.count(f'job_id="{pid}"') == 2
    assert "gpulock_collector_success{collector=" in seen
    assert not [
        line for line in seen.splitlines() if "collector_success{" in line and "} 0" in line
    ]


def test_it_tells_a_stranger_on_a_card_from_the_jobs_own_processes(node: Node) -> None:
    node.claim(1)
    node.machine.run("systemd-run", "--quiet", "--unit=job-stranger", "--uid=65534", "sleep", "600")
    mine, stranger = node.main_pid("job"), wait_sleeps(node, "job-stranger")
    uuid = next(iter(node.locks().values())).uuid
    on_card = [Process(mine, "1G"), Process(stranger, "2G")]

    node.package.double.processes(0, on_card)
    node.package.point()

    series = f'gpulock_gpu_foreign_processes{{gpu="0",uuid="{uuid}"}}'
    node.wait_metric(series, 1)
    # what ProtectProc= would cost: nobody else's process can be told
    node.reload(EXPORTER, "ProtectProc=invisible")
    node.wait_metric("gpulock_nvml_up", 1)
    node.wait_metric(series, None)
    assert "! gpulock-exporter.service: ProtectProc=invisible" in node.gpulock("doctor")


def test_it_may_open_the_cards_and_nothing_else_and_write_nothing_of_gpulocks(
    node: Node,
) -> None:
    run = node.machine.run
    node.claim(1)
    node.machine.write("/srv/probe.py", PROBE)
    run("bash", "-c", "rm -f /dev/nvidia9 /dev/tun0; mknod -m 666 /dev/tun0 c 10 200")
    paths = ["/dev/nvidia0", "/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia9", "/dev/tun0"]
    paths += ["/dev/null", "/run/gpulock/boot_id", "/run/gpulock/gate", "/srv/anybodys"]
    run("install", "-m", "666", "/dev/null", "/srv/anybodys")
    program = f"{OPT}/bin/python3 /srv/probe.py {' '.join(paths)}"
    # what an nvidia-modprobe does: it makes a card's node, as root, in the service's own cgroup
    node.machine.write("/srv/modprobe", "#!/bin/sh\nmknod -m 666 /dev/nvidia9 c 195 9\n")
    run("chmod", "755", "/srv/modprobe")

    node.reload(EXPORTER, "ExecStartPre=+/srv/modprobe", f"ExecStartPost={program}")

    def said() -> dict[str, str]:
        return dict(line.split() for line in node.machine.journal(EXPORTER) if line.startswith("/"))

    wait_until(lambda: len(said()) == len(paths), why="every path")
    assert said() == {
        "/dev/nvidia0": "ENXIO",  # allowed: there is no driver behind it
        "/dev/nvidia7": "ENXIO",
        "/dev/nvidiactl": "ENXIO",
        "/dev/nvidia9": "ENXIO",  # a card whose node came after the unit's rules were made
        "/dev/tun0": "EPERM",
        "/dev/null": "OPEN",
        "/run/gpulock/boot_id": "EACCES",
        "/run/gpulock/gate": "EACCES",
        "/srv/anybodys": "EROFS",  # ProtectSystem=strict
    }


def workers(node: Node) -> list[str]:
    group = node.machine.run("systemctl", "status", EXPORTER, "--no-pager", "-l").stdout
    return [line for line in group.splitlines() if "gpulock_exporter.worker.process" in line]


def test_a_pause_lets_go_of_the_driver_until_it_is_told_to_go_on(node: Node) -> None:
    node.wait_metric("gpulock_nvml_up", 1)
    assert len(workers(node)) == 1

    node.machine.run(f"{OPT}/bin/gpulock-exporter", "pause")
    wait_until(lambda: not workers(node), why="the worker to be gone")
    assert "gpulock_exporter_build_info" in node.scrape()
    node.machine.run(f"{OPT}/bin/gpulock-exporter", "resume")

    wait_until(lambda: len(workers(node)) == 1, why="another worker")
    node.wait_metric("gpulock_nvml_up", 1)
    assert show(node, EXPORTER, "NRestarts") == "0"


def test_what_it_wrote_outlives_it_for_the_history(node: Node) -> None:
    node.wait_metric("gpulock_nvml_up", 1)

    node.machine.run("systemctl", "stop", SOCKET, EXPORTER)

    assert show(node, EXPORTER, "Result") == "success"
    sample = node.machine.path("/run/gpulock-exporter/sample")
    assert sample.read_text().startswith("gpulock-sample 1\n")


def test_an_exporter_that_dies_is_started_again(node: Node) -> None:
    node.reload(EXPORTER, "RestartSec=100ms")
    first = node.main_pid(EXPORTER)

    node.machine.run("kill", "-KILL", str(first))

    wait_until(lambda: node.main_pid(EXPORTER) not in (0, first), why="another exporter")
    node.wait_metric("gpulock_nvml_up", 1)


def test_an_exporter_that_hangs_is_killed_and_started_again_and_one_that_works_is_left_alone(
    node: Node,
) -> None:
    node.reload(EXPORTER, "WatchdogSec=6", "RestartSec=100ms")
    node.wait_metric("gpulock_nvml_up", 1)
    first = node.main_pid(EXPORTER)
    began = int(show(node, EXPORTER, "WatchdogTimestampMonotonic"))
    wait_until(
        lambda: int(show(node, EXPORTER, "WatchdogTimestampMonotonic")) > began + 18_000_000,
        why="three limits of the watchdog to pass",
    )
    assert (node.main_pid(EXPORTER), show(node, EXPORTER, "NRestarts")) == (first, "0")

    with frozen(node.machine.enter(), first):  # the thread of that number is the main one
        wait_until(lambda: node.main_pid(EXPORTER) not in (0, first), why="another exporter")
    node.wait_metric("gpulock_nvml_up", 1)
    assert show(node, EXPORTER, "NRestarts") == "1"
    for words in ("Watchdog timeout (limit 6s)!", "Fatal Python error: Aborted", "program.py"):
        wait_journal(node, EXPORTER, words)


# --- the end ------------------------------------------------------------------------------------


def test_uninstall_removes_everything_but_locks_history_and_user(package: Package) -> None:
    with_services = Machine(binds=package.binds)
    with_services.up()
    try:
        node = Node(with_services, package)
        node.prepare()
        before = etc(with_services)
        node.gpulock("install", "systemd")
        held = records(node.claim(2))
        assert etc(with_services) != before

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
    """Return the files that an installation could change, links included."""
    find = (
        "cd /etc && find systemd/system tmpfiles.d sysusers.d logrotate.d -type f -o -type l | sort"
    )
    names = machine.run("bash", "-c", find).stdout.split()
    shown = machine.run("bash", "-c", f"cd /etc && cat {' '.join(names)} 2>/dev/null || true")
    return {"names": " ".join(names), "text": shown.stdout}
