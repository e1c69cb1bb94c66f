# SPDX-License-Identifier: Apache-2.0
"""Slurm's configuration is read as Slurm reads it, from slurmctld or from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.site import parse_slurmd_arguments
from gpulock.install.slurm.slurm_conf import (
    SlurmConf,
    parse_scontrol_config,
    read_slurm_conf,
)
from gpulock.install.slurm.wanted import EPILOG, PROLOG, TASK, InForceHook, find_slurm_hooks


def test_several_prologs_of_newer_releases_are_read_and_another_program_is_refused() -> None:
    conf = parse_scontrol_config("Prolog[0] = /a\nProlog[1] = /b/*\nSLURM_VERSION = 24.05.1\n")
    assert conf.get("Prolog") == "/a\n/b/*"
    with pytest.raises(InstallError, match="SLURM_VERSION"):
        parse_scontrol_config("Usage: scontrol\n")


def test_a_file_is_read_with_its_includes_continuations_and_comments(tmp_path: Path) -> None:
    (tmp_path / "hooks.conf").write_text('Prolog="/a b/prolog"\n')
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "# Prolog=/no\nPROLOGFLAGS=Alloc, # Contain\nEpilog=/e\nInclude hooks.conf\n"
        "RequeueExit=75, \\\n  80-82\nTaskProlog=/a TaskEpilog=/b\n"
        "Epilog=(null)\n"
    )

    found = read_slurm_conf(conf)

    assert found.get("Prolog") == "/a b/prolog"
    assert found.words("PrologFlags") == ["Alloc"]
    assert found.get("TaskEpilog") == "/b"
    assert found.get("Epilog") == ""


def test_an_include_without_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Include a\n")

    with pytest.raises(InstallError, match="without end"):
        read_slurm_conf(tmp_path / "a")


# --- where Slurm is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named", "found"),
    [
        (["/usr/sbin/slurmd", "-D", "-s"], "", ("", "")),
        (["slurmd", "-N", "n1", "-f", "/x/slurm.conf"], "/y/slurm.conf", ("/x/slurm.conf", "n1")),
        (["slurmd", "-Nn1", "-f/x/slurm.conf"], "", ("/x/slurm.conf", "n1")),
        (["slurmd", "-D"], "/y/slurm.conf", ("/y/slurm.conf", "")),
        (["slurmd", "--conf-server", "head", "-f"], "", ("", "")),
    ],
)
def test_what_slurmd_was_started_with_is_found(
    words: list[str], named: str, found: tuple[str, str]
) -> None:
    assert parse_slurmd_arguments(words, named) == found


# --- which hooks are in force --------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> HookPaths:
    hooks = HookPaths(tmp_path / "hooks/current")
    for path in (hooks.slurm_prolog, hooks.slurm_task, hooks.slurm_epilog):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
    return hooks


def conf(**values: object) -> SlurmConf:
    return SlurmConf({key.lower(): str(value) for key, value in values.items()})


def find_hook(conf: SlurmConf, key: str, paths: HookPaths) -> InForceHook:
    return next(hook for hook in find_slurm_hooks(conf, paths) if hook.key == key)


@pytest.mark.parametrize(("key", "ours"), [(PROLOG, "90-gpulock"), (EPILOG, "10-gpulock")])
def test_of_what_a_pattern_names_ours_is_known(
    tmp_path: Path, paths: HookPaths, key: str, ours: str
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "50-site").write_text("#!/bin/sh\n")
    target = {PROLOG: paths.slurm_prolog, EPILOG: paths.slurm_epilog}[key]
    (folder / ours).symlink_to(target)

    hook = find_hook(conf(**{key: f"{folder}/*"}), key, paths)

    assert [*hook.ours] == [folder / ours]


def test_a_script_that_calls_ours_leads_to_it_and_a_comment_does_not(
    tmp_path: Path, paths: HookPaths
) -> None:
    script = tmp_path / "task-prolog"
    script.write_text(f'#!/bin/sh\n/site/task || exit\nexec "{paths.slurm_task}"\n')
    assert find_hook(conf(TaskProlog=script), TASK, paths).ours == (script,)

    script.write_text(f"#!/bin/sh\n# exec {paths.slurm_task}\nexit 0\n")
    assert find_hook(conf(TaskProlog=script), TASK, paths).ours == ()


@pytest.mark.parametrize(
    ("value", "holds"),
    [("213", True), ("75,200-220", True), ("200-212", False), ("", False), ("x-y,213x", False)],
)
def test_an_exit_code_is_found_in_lists_and_ranges(value: str, holds: bool) -> None:
    assert SlurmConf({"requeueexit": value}).has("RequeueExit", "213") is holds
