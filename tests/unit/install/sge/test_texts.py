# SPDX-License-Identifier: Apache-2.0
"""The queue's command lines: ours alone, ours with the site's behind it, and telling them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.sge import queue_hooks as commands
from gpulock.install.sge.queue_hooks import HookLine

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


OURS = HookLine(CURRENT, "prolog").text()


@pytest.mark.parametrize(
    ("line", "hook", "ours"),
    [
        (f"{OURS} mine", "prolog", True),
        (f"{OURS} $job_owner", "prolog", True),
        (f"{OURS} other /x", "prolog", True),
        (OURS, "epilog", False),
        ("root@/site/prolog/sge", "prolog", False),
        (None, "prolog", False),
    ],
)
def test_a_line_of_the_sites_or_one_that_somebody_edited_is_not_taken_apart(
    line: str | None, hook: str, ours: bool
) -> None:
    assert commands.is_gpulock_command(line, hook) is ours
    assert commands.parse_hook_line(line, hook) is None


@pytest.mark.parametrize("site", ["/a,b", "/a [x]", '/a "x y"', "/a\\b", "/odd=path/hook"])
def test_a_command_that_cannot_be_carried_over_is_refused(site: str) -> None:
    with pytest.raises(InstallError, match="cannot be kept"):
        commands.make_hook_line(CURRENT, "prolog", site)
