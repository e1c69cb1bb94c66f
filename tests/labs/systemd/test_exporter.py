# SPDX-License-Identifier: Apache-2.0
"""The exporter under a real systemd, with cgroup v2 alone and with v1 beside it.

The machine has eight simulated cards that a double of NVML tells of; a job is `gpulock run` in a
unit of its own.
"""

from __future__ import annotations

import pytest

from gpulock.install.systemd.units import EXPORTER, SOCKET
from tests.labs.common.frozen_thread import frozen
from tests.labs.systemd.gpulock import GPUS, OPT, Node
from tests.labs.systemd.services import (
    PROBE,
    journal,
    outlive_watchdog,
    show,
    wait_journal,
    wait_sleeps,
)
from tests.nvml.double import Process
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


def test_a_scrape_starts_the_exporter_through_its_socket_and_what_it_wrote_outlives_it(
    node: Node,
) -> None:
    node.wait_metric("gpulock_nvml_up", 1)
    node.machine.run("systemctl", "stop", EXPORTER)
    assert show(node, EXPORTER, "ActiveState") == "inactive"
    assert show(node, EXPORTER, "Result") == "success"
    assert show(node, SOCKET, "ActiveState") == "active"
    sample = node.machine.path("/run/gpulock-exporter/sample")  # for the history
    assert sample.read_text().startswith("gpulock-sample 1\n")

    assert "gpulock-exporter is healthy" in node.scrape("/-/healthy")

    wait_until(lambda: show(node, EXPORTER, "ActiveState") == "active", why="systemd to know")
    node.wait_metric("gpulock_nvml_up", 1)
    assert "ListenStream" not in journal(node, EXPORTER)
    for _ in range(3):
        node.machine.run("systemctl", "restart", "--no-block", EXPORTER)
        assert "gpulock-exporter is healthy" in node.scrape("/-/healthy")


def test_folders_and_a_port_that_settings_name_are_there_before_the_sandbox_closes(
    node: Node,
) -> None:
    mps = {"SHARES": "0:2", "SHARE_MPS": "yes"}
    node.configure(**mps)
    node.gpulock("install", "systemd")
    node.wait_metric("gpulock_nvml_up", 1)

    seen = {}
    for folder in ("/run/gpulock-exporter", "/var/lib/gpulock-mps"):
        seen[folder] = node.machine.run("stat", "-c", "%U %a", folder).stdout
    sample = node.machine.path("/run/gpulock-exporter/sample").exists()
    again = node.gpulock("install", "systemd")
    node.configure(EXPORTER_LISTEN="127.0.0.1:9777")
    node.gpulock("install", "systemd")
    moved = node.scrape("/-/healthy", 9777)
    node.configure()
    node.gpulock("install", "systemd")

    assert "gpulock-exporter is healthy" in moved
    assert [*seen.values()] == ["gpulock-exporter 755\n", "root 755\n"]
    assert sample
    assert "nothing to change" in again


def test_its_own_user_sees_cards_locks_and_jobs_and_tells_a_stranger_from_these(node: Node) -> None:
    held = node.claim(2)

    node.wait_metric('gpulock_gpus{state="held"}', 2)

    watts = "\ngpulock_gpu_power_watts{"
    seen = wait_until(
        lambda: text if (text := node.scrape()).count(watts) == GPUS else None,
        why=lambda: f"a scrape with every card\n{node.scrape()}",
    )
    assert seen.count(f'job_id="{next(iter(held.values())).pid}"') == 2
    collected = [line for line in seen.splitlines() if "collector_success{" in line]
    assert collected and not [line for line in collected if "} 0" in line]

    node.machine.run("systemd-run", "--quiet", "--unit=job-stranger", "--uid=65534", "sleep", "600")
    mine, stranger = node.main_pid("job"), wait_sleeps(node, "job-stranger")
    uuid = next(one.uuid_of(name) for name, one in node.locks().items())
    on_card = [Process(mine, "1G"), Process(stranger, "2G")]

    node.package.double.processes(0, on_card)

    series = f'gpulock_gpu_foreign_processes{{gpu="0",uuid="{uuid}"}}'
    node.wait_metric(series, 1)
    # what ProtectProc= would cost: nobody else's process can be told
    node.reload(EXPORTER, "ProtectProc=invisible")
    node.wait_metric("gpulock_nvml_up", 1)
    node.wait_metric(series, None)


def test_it_may_open_the_cards_and_nothing_else_and_write_nothing_of_gpulocks(
    node: Node,
) -> None:
    run = node.machine.run
    node.claim(1)
    node.machine.write("/srv/probe.py", PROBE)
    run("bash", "-c", "rm -f /dev/nvidia9 /dev/tun0; mknod -m 666 /dev/tun0 c 10 200")
    paths = ["/dev/nvidia0", "/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia9", "/dev/tun0"]
    paths += [
        "/dev/null",
        "/run/gpulock.claims/boot_id",
        "/run/gpulock.claims/gate",
        "/srv/anybodys",
    ]
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
        "/run/gpulock.claims/boot_id": "EACCES",
        "/run/gpulock.claims/gate": "EACCES",
        "/srv/anybodys": "EROFS",  # ProtectSystem=strict
    }


def test_an_exporter_that_hangs_is_killed_and_started_again_and_one_that_works_is_left_alone(
    node: Node,
) -> None:
    first = outlive_watchdog(node, EXPORTER, "RestartSec=100ms")
    node.wait_metric("gpulock_nvml_up", 1)

    with frozen(node.machine.enter(), first):  # the thread of that number is the main one
        wait_until(lambda: node.main_pid(EXPORTER) not in (0, first), why="another exporter")
    node.wait_metric("gpulock_nvml_up", 1)
    assert show(node, EXPORTER, "NRestarts") == "1"
    for words in ("Watchdog timeout (limit 6s)!", "Fatal Python error: Aborted", "program.py"):
        wait_journal(node, EXPORTER, words)
