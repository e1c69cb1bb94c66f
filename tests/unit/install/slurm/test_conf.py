# SPDX-License-Identifier: Apache-2.0
"""Slurm's configuration is read as Slurm reads it, from slurmctld or from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm import site
from gpulock.install.slurm.configured_hooks import (
    EPILOG,
    PROLOG,
    TASK,
    InForceHook,
    find_slurm_hooks,
    misplaced_program,
)
from gpulock.install.slurm.site import Slurmd as Daemon
from gpulock.install.slurm.site import find_own_slurmd, find_slurm_site, parse_slurmd_arguments
from gpulock.install.slurm.slurm_conf import (
    SlurmConf,
    add_list_words,
    parse_scontrol_config,
    read_slurm_conf,
)
from gpulock.node.settings import Settings

RECORDED = Path(__file__).parents[3] / "support/data/slurm-22.05/config"


def test_what_slurmctld_prints_is_read_and_what_is_not_set_is_not_there() -> None:
    conf = parse_scontrol_config(RECORDED.read_text())

    assert conf.get("SLURM_VERSION") == "22.05.8"
    assert conf.get("proctracktype") == "proctrack/cgroup"
    assert conf.get("Prolog") == ""
    assert conf.get("ConstrainDevices") == "no"
    assert conf.seconds("MessageTimeout") == 10
    assert conf.seconds("PrologEpilogTimeout") is None


def test_several_prologs_of_newer_releases_are_all_read() -> None:
    conf = parse_scontrol_config("Prolog[0] = /a\nProlog[1] = /b/*\nSLURM_VERSION = 24.05.1\n")

    assert conf.patterns("Prolog") == ["/a", "/b/*"]


def test_the_output_of_another_program_is_refused() -> None:
    with pytest.raises(InstallError, match="SLURM_VERSION"):
        parse_scontrol_config("Usage: scontrol\n")


def test_a_file_is_read_with_its_includes_continuations_and_comments(tmp_path: Path) -> None:
    (tmp_path / "hooks.conf").write_text('Prolog="/a b/prolog"\n')
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "# Prolog=/no\nPROLOGFLAGS=Alloc, # Contain\nEpilog=/e\nInclude hooks.conf\n"
        "NodeName=n1 Prolog=/not/ours\nRequeueExit=75, \\\n  80-82\nTaskProlog=/a TaskEpilog=/b\n"
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


@pytest.mark.parametrize(
    ("value", "holds"),
    [("213", True), ("75,200-220", True), ("200-212", False), ("", False), ("x-y,213x", False)],
)
def test_an_exit_code_is_found_in_lists_and_ranges(value: str, holds: bool) -> None:
    assert SlurmConf({"requeueexit": value}, "").holds_exit("RequeueExit", 213) is holds


def test_a_list_keeps_what_it_holds_and_gets_what_it_lacks() -> None:
    assert add_list_words(["75", "80-82"], "213") == "75,80-82,213"
    assert add_list_words(["alloc"], "Alloc", "Contain") == "alloc,Contain"


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


def programs(folder: Path) -> Path:
    for name in ("bin/scontrol", "sbin/slurmd"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder / "sbin/slurmd"


def test_the_clients_are_found_beside_the_slurmd_that_runs(tmp_path: Path) -> None:
    slurmd = programs(tmp_path)

    found = find_slurm_site(Settings({}), Daemon(1, slurmd, "/x/slurm.conf", "n1"))

    assert found.binaries == tmp_path / "bin"
    assert found.gres_conf == Path("/x/gres.conf")
    assert found.node == "n1"


def test_slurmds_of_another_cluster_on_this_machine_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurmd = programs(tmp_path)
    daemons = [Daemon(1, slurmd, "/x/slurm.conf", "n1"), Daemon(2, slurmd, "/y/slurm.conf", "m1")]
    monkeypatch.setattr(site, "find_slurmds", lambda: daemons)

    with pytest.raises(InstallError, match="set SLURM_CONF"):
        find_own_slurmd(Settings({}))

    assert find_own_slurmd(Settings({"SLURM_CONF": "/y/slurm.conf"})) == daemons[1]


# --- which hooks are in force --------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> HookPaths:
    hooks = HookPaths(tmp_path / "hooks/current")
    for path in (hooks.slurm_prolog, hooks.slurm_task, hooks.slurm_epilog):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
    return hooks


def conf(**values: object) -> SlurmConf:
    return SlurmConf({key.lower(): str(value) for key, value in values.items()}, "slurmctld")


def find_hook(conf: SlurmConf, key: str, paths: HookPaths) -> InForceHook:
    return next(hook for hook in find_slurm_hooks(conf, paths) if hook.key == key)


def test_a_pattern_names_programs_in_the_order_in_which_slurm_runs_them(
    tmp_path: Path, paths: HookPaths
) -> None:
    folder = tmp_path / "prolog.d"
    folder.mkdir()
    for name in ("10-a", "50-b"):
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "90-gpulock").symlink_to(paths.slurm_prolog)

    hook = find_hook(conf(Prolog=f"{folder}/*"), PROLOG, paths)

    assert [path.name for path in hook.programs] == ["90-gpulock", "50-b", "10-a"]
    assert [path.name for path in hook.ours] == ["90-gpulock"]
    assert misplaced_program(hook) is None


def test_a_program_of_the_sites_before_our_prolog_or_after_our_epilog_is_misplaced(
    tmp_path: Path, paths: HookPaths
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "50-site").write_text("#!/bin/sh\n")
    (folder / "10-gpulock").symlink_to(paths.slurm_prolog)
    (folder / "90-gpulock").symlink_to(paths.slurm_epilog)

    for key in (PROLOG, EPILOG):
        found = misplaced_program(find_hook(conf(**{key: f"{folder}/*"}), key, paths))
        assert found is not None


def test_a_script_that_calls_ours_leads_to_it_and_a_comment_does_not(
    tmp_path: Path, paths: HookPaths
) -> None:
    script = tmp_path / "task-prolog"
    script.write_text(f'#!/bin/sh\n/site/task || exit\nexec "{paths.slurm_task}"\n')
    assert find_hook(conf(TaskProlog=script), TASK, paths).ours == (script,)

    script.write_text(f"#!/bin/sh\n# exec {paths.slurm_task}\nexit 0\n")
    assert find_hook(conf(TaskProlog=script), TASK, paths).ours == ()


def test_a_program_that_is_not_there_is_not_ours(paths: HookPaths) -> None:
    assert find_hook(conf(Epilog="/nowhere/epilog"), EPILOG, paths).ours == ()
