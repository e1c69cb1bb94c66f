# SPDX-License-Identifier: Apache-2.0
"""Two tasks of one array on a node: one works, and the shipped script ends the one that idles."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock.node.devices import Device
from gpulock.store.owner import Owner
from tests.labs.common.exporter_node import Observer, exporter
from tests.labs.common.installed import Installed
from tests.labs.daemon.daemon_lab import Daemon
from tests.nvml.double import Double
from tests.support.wait import wait_until

BUSY = 90  # percent
WARN, KILL = "2", "4"  # observed seconds
SCRIPT = Path(__file__).parents[3] / "docs/examples/end-idle-job"
TELL = 'echo "$1 $GPULOCK_JOB_ID $GPULOCK_TASK_ID $GPULOCK_DEVICES"'


class Idling:
    """A node whose policy is to end what idles; `told` is what the site's command was told."""

    def __init__(self, place: Path, seen_by: Observer, devices: Sequence[Device]) -> None:
        self._place = place
        self._nvml = seen_by.nvml
        self._index = {device.id: device.index for device in devices}

    def told(self) -> list[str]:
        """Return what the command was told, by its calls."""
        path = self._place / "told"
        return path.read_text().splitlines() if path.exists() else []

    def idle(self, device: str) -> None:
        """Let a device do nothing from now on."""
        self._nvml.load(self._index[device], 0)


def keys(place: Path) -> dict[str, str]:
    """Make a folder anew for a node's command; return the settings that name it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    command = place / "command"
    command.write_text(f'#!/bin/sh\n{TELL} >> {place}/told\nexec {SCRIPT} "$1"\n')
    command.chmod(0o755)
    return {
        "IDLE_WARN": WARN,
        "IDLE_KILL": KILL,
        "IDLE_COMMAND": str(command),
    }


@contextmanager
def idling(gpus: Installed, node: str, place: Path) -> Generator[Idling]:
    """Observe a node with the settings that `keys` made; all its GPUs are busy."""
    devices = gpus.node(node).devices()

    def work(nvml: Double) -> None:
        for device in devices:
            nvml.load(device.index, BUSY)

    with exporter(gpus, node, place, lambda told: bool(told.devices), work) as seen_by:
        yield Idling(place, seen_by, devices)


def assert_ends_the_idle_one(
    node: Idling,
    daemon: Daemon,
    locks: Callable[[], dict[str, Owner]],
    idle: str,
) -> None:
    """Let one of two devices in use do nothing: its task is warned, then ended, the other not."""
    before = locks()
    record = before[idle]
    (other,) = set(before) - {idle}

    def ended() -> bool:
        assert other in locks(), daemon.said()
        return idle not in locks()

    daemon.goes_round()
    assert node.told() == []
    node.idle(idle)
    daemon.rounds_until(ended, f"{record.job()} to be ended")
    facts = f"{record.job_id} {record.task_id} {idle}"
    wait_until(lambda: len(node.told()) > 1, why="the command to be told")
    daemon.goes_round()
    assert node.told() == [f"warn {facts}", f"kill {facts}"]
    assert "IDLE_COMMAND kill" in daemon.said()
    assert {name: one.token for name, one in locks().items()} == {other: before[other].token}
