# SPDX-License-Identifier: Apache-2.0
"""A shell completes commands, devices, jobs and presets; of a broken node it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from gpulock.cli import command_group
from tests.support.cli_site import Site


def offered(config: Path | str, *words: str) -> list[str]:
    """Return what is offered for the last word."""
    shell = ShellComplete(command_group, {}, "gpulock", "_GPULOCK_COMPLETE")
    found = shell.get_completions(["--config", str(config), *words[:-1]], words[-1])
    return [item.value for item in found if item.type == "plain"]


def test_commands_are_offered(site: Site) -> None:
    assert offered(site.config, "re") == [
        *("report", "release", "reap", "reserve", "restore", "reset"),
    ]


@pytest.mark.parametrize(
    "command", ["reserve", "unreserve", "quarantine", "restore", "test", "reset", "release"]
)
def test_devices_are_offered_by_number_and_by_what_is_begun(site: Site, command: str) -> None:
    assert offered(site.config, command, "") == [str(number) for number in range(8)]
    assert offered(site.config, command, site.id(3)[:7]) == [site.id(3)]


def test_devices_are_offered_for_an_option(site: Site) -> None:
    assert offered(site.config, "history", "--device", "") == [str(number) for number in range(8)]


def test_jobs_that_hold_devices_are_offered(site: Site) -> None:
    site.hold(1, job_id="4711", task_id="2")
    site.hold(2, token="u", job_id="12")
    assert offered(site.config, "report", "") == ["12", "4711.2"]
    assert offered(site.config, "why", "47") == ["4711.2"]
    assert offered(site.config, "release", "--job", "47") == ["4711.2"]
    assert offered(site.config, "history", "--job", "") == ["12", "4711.2"]


def test_presets_are_offered(site: Site) -> None:
    assert "a100-mig" in offered(site.config, "simulate", "D", "--preset", "a1")


def test_of_a_node_that_cannot_be_read_nothing_is_offered(tmp_path: Path) -> None:
    assert offered(tmp_path / "none.conf", "why", "") == []
