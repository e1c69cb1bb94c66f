# SPDX-License-Identifier: Apache-2.0
"""The systemd lab boots, powers off, and leaves the host as it was."""

from __future__ import annotations

import os

import pytest

from tests.labs.systemd.machine import Machine, host_state

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("mode", ["hybrid", "unified"])
def test_a_machine_boots_and_nothing_of_it_is_left_on_the_host(mode: str) -> None:
    before = host_state()
    machine = Machine(mode)

    machine.up()

    try:
        assert machine.run("systemctl", "is-system-running").stdout == "running\n"
        assert machine.run("cat", "/proc/1/comm").stdout == "systemd\n"
        assert machine.left_behind() != []
    finally:
        machine.down()
    assert machine.left_behind() == []
    assert host_state() == before


def test_down_ends_a_machine_that_another_process_left() -> None:
    first = Machine()
    first.up()

    Machine().down()

    assert first.left_behind() == []
    first.down()  # what is not there any more does not matter to it


def test_what_is_written_on_the_machine_is_gone_with_it() -> None:
    machine = Machine()
    machine.up()
    try:
        machine.write("/etc/gpulock-lab-was-here", "x\n")
        assert machine.path("/etc/gpulock-lab-was-here").exists()
    finally:
        machine.down()

    assert not os.path.exists("/etc/gpulock-lab-was-here")
