# SPDX-License-Identifier: Apache-2.0
"""The queue's command lines: ours alone, ours with the site's behind it, and telling them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.sge import texts as commands
from gpulock.install.sge.texts import HookLine

CURRENT = Path("/usr/lib/gpulock/hooks/current")


@pytest.mark.parametrize("hook", commands.HOOKS)
def test_our_own_line_is_known_again_wherever_it_is_installed(hook: str) -> None:
    line = commands.HookLine(Path("/elsewhere/current"), hook).text()

    assert commands.parse_hook_line(line, hook) == HookLine(Path("/elsewhere/current"), hook)
    assert line.startswith("root@/elsewhere/current/prolog/drop-env /elsewhere/current/")


@pytest.mark.parametrize("hook", commands.HOOKS)
@pytest.mark.parametrize("site", ["/site/hook", "sgeadmin@/site/hook $queue -x", "root@hook a=b"])
def test_a_sites_command_comes_back_out_of_our_line(hook: str, site: str) -> None:
    line = commands.make_hook_line(CURRENT, hook, site)

    assert commands.parse_hook_line(line.text(), hook) == line
    assert line.text().endswith(f" $job_owner {site}")


@pytest.mark.parametrize("edit", [" mine", " $job_owner", " other /x"])
def test_a_line_that_somebody_edited_is_ours_and_not_taken_apart(edit: str) -> None:
    line = f"{commands.HookLine(CURRENT, 'prolog').text()}{edit}"

    assert commands.is_gpulock_command(line, "prolog")
    assert commands.parse_hook_line(line, "prolog") is None


def test_a_sites_own_line_is_not_ours() -> None:
    assert not commands.is_gpulock_command("root@/site/prolog/sge", "prolog")
    assert commands.parse_hook_line("root@/site/prolog/sge", "prolog") is None
    assert commands.parse_hook_line(None, "prolog") is None


def test_a_prolog_of_ours_in_the_epilogs_place_is_not_our_epilog() -> None:
    assert not commands.is_gpulock_command(commands.HookLine(CURRENT, "prolog").text(), "epilog")


@pytest.mark.parametrize("site", ["/a,b", "/a [x]", '/a "x y"', "/a\\b", "/odd=path/hook"])
def test_a_command_that_cannot_be_carried_over_is_refused(site: str) -> None:
    with pytest.raises(InstallError, match="cannot be kept"):
        commands.make_hook_line(CURRENT, "prolog", site)
