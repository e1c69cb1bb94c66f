# SPDX-License-Identifier: Apache-2.0
"""The systemd lab boots, powers off, and leaves devices and kernel settings as they were."""

from __future__ import annotations

import pytest

from tests.labs.systemd.machine import Machine, host_state

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("mode", ["hybrid", "unified"])
def test_a_machine_boots_and_changes_nothing_of_the_host(mode: str) -> None:
    before = host_state()
    machine = Machine(mode)

    machine.up()

    try:
        assert machine.run("systemctl", "is-system-running").stdout == "running\n"
        assert machine.run("cat", "/proc/1/comm").stdout == "systemd\n"
    finally:
        machine.down()
    assert host_state() == before
