# SPDX-License-Identifier: Apache-2.0
"""The installed hooks: rendered whole, tried, swapped in at one stroke, loaded from one file."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.cli import command_group
from gpulock.install import versions
from gpulock.install.files import InstallError
from gpulock.install.hook_script import HOOKS, preload_name
from gpulock.install.hooks import (
    PODMAN_PROGRAM,
    HookPaths,
    hook_modules,
    hooks_python,
    hooks_version,
    render_hooks,
)
from gpulock.install.items import Wanted
from gpulock.install.trial import try_sge_hooks
from gpulock.install.versions import SGE, SLURM, Hooks, current_hooks, version_in_force
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.faults import raising
from tests.support.install_site import ignore
from tests.support.runner import command_runner

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_simulated_node(tmp_path / "node", "workstation").config


@pytest.fixture
def installed(config: Path, monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """Give hooks that nobody tries, which takes ten processes."""
    monkeypatch.setitem(versions._TRIALS, SGE, ignore)
    return Hooks(read_settings(str(config)), SGE)


def test_a_rendered_folder_works_for_any_caller_and_belongs_to_one(
    tmp_path: Path, config: Path
) -> None:
    stray = tmp_path / "hooks/lib/gpulock/json.py"
    stray.parent.mkdir(parents=True)
    stray.write_text("raise SystemExit\n")
    old = os.umask(0o077)
    try:
        paths = render_hooks(tmp_path / "hooks", config)
    finally:
        os.umask(old)

    for path in (paths.folder, *paths.folder.rglob("*")):
        executable = path.is_dir() or not path.is_relative_to(paths.library)
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o755 if executable else 0o644), path
    compiled = {path.read_bytes()[4] for path in paths.library.rglob("__pycache__/*.pyc")}
    assert compiled == {1}, "by a hash that is not compared (PEP 552)"
    assert not {"cli", "install"} & {path.name for path in (paths.library / "gpulock").iterdir()}
    assert {str(p.relative_to(paths.library)) for p in paths.library.rglob("*.py")} == set(
        hook_modules()
    )


def test_the_distributions_python_has_the_name_that_its_upgrades_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks named python3.11, and every job failed once Debian had removed it."""
    link = tmp_path / "python3"
    link.symlink_to(sys.executable)
    monkeypatch.setattr("gpulock.install.hooks.SYSTEM_PYTHON", str(link))
    other = tmp_path / "elsewhere"
    shutil.copy(os.path.realpath(sys.executable), other)

    assert hooks_python() == str(link)
    monkeypatch.setattr(sys, "executable", str(other))
    assert hooks_python() == str(other)


def test_what_the_interpreter_cannot_compile_is_told(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that a hook loads only when it needs it, too."""
    broken = {**hook_modules(), "gpulock/alloc/kinds.py": b"def\n"}
    monkeypatch.setattr("gpulock.install.hooks.hook_modules", lambda: broken)
    with pytest.raises(InstallError, match=r"(?s)cannot compile .*alloc/kinds\.py.*SyntaxError"):
        render_hooks(tmp_path / "hooks", config)


def test_hooks_pass_the_self_test_and_damaged_ones_do_not(tmp_path: Path, config: Path) -> None:
    paths = render_hooks(tmp_path / "hooks", config)
    try_sge_hooks(paths)

    paths.epilog.write_text("#!/bin/sh\nexit 1\n")

    with pytest.raises(InstallError, match=r"drop-env .*epilog/sge ended with 0: ''$"):
        try_sge_hooks(paths)


def test_hooks_without_drop_env_do_for_slurm_alone(
    installed: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions._TRIALS, SLURM, ignore)
    monkeypatch.setattr(
        "gpulock.install.drop_env.drop_env_program", raising(InstallError("no C compiler"))
    )

    with pytest.raises(InstallError, match="no C compiler"):
        installed.write(Wanted.PRESENT)
    Hooks(installed.settings, SLURM).write(Wanted.PRESENT)

    assert not current_hooks(installed.settings).drop_env.exists()
    Path(installed.settings.state_dir, "sge-map").touch()
    with pytest.raises(InstallError, match="no C compiler"):
        Hooks(installed.settings, SLURM).write(Wanted.PRESENT)


def test_a_version_is_tried_and_on_disk_whole_before_it_is_in_force(
    installed: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut right after the swap would leave hooks that are empty."""
    synced: list[str] = []
    before: list[str] = []
    sync, switch = os.fsync, versions.switch_hook_version

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    def swap(prefix: Path, name: str) -> None:
        before.extend(synced)
        switch(prefix, name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(versions, "switch_hook_version", swap)
    with monkeypatch.context() as patch:
        patch.setitem(versions._TRIALS, SGE, raising(InstallError("self-test: no")))
        with pytest.raises(InstallError, match="self-test: no; nothing was put in force"):
            installed.write(Wanted.PRESENT)
    assert version_in_force(installed.folder) is None
    installed.write(Wanted.PRESENT)

    folder = installed.folder / hooks_version(installed.config)
    assert {str(path) for path in (folder, *folder.rglob("*"))} <= {*before}
    assert synced[len(before) :] == [str(installed.folder)]


def test_a_damaged_version_is_made_anew_beside_and_put_in_force_whole(
    installed: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files replaced one by one would be hooks of two kinds for the jobs of that moment."""
    switch = versions.switch_hook_version
    installed.write(Wanted.PRESENT)
    own = hooks_version(installed.config)
    for before, after in ((own, f"{own}.again"), (f"{own}.again", own)):
        damaged = installed.folder / before
        (damaged / "epilog/sge").write_text("#!/bin/sh\n")
        (damaged / "lib/gpulock/errors.py").unlink()
        left = {path: path.stat().st_mtime_ns for path in damaged.rglob("*")}

        def swap(folder: Path, name: str, left: dict[Path, int] = left) -> None:
            assert {path: path.stat().st_mtime_ns for path in left} == left
            switch(folder, name)

        monkeypatch.setattr(versions, "switch_hook_version", swap)
        assert installed.read() == f"{before} (damaged: epilog/sge)"
        installed.write(Wanted.PRESENT)
        assert version_in_force(installed.folder) == after
        assert installed.read() == own
        assert versions.list_hook_versions(installed.folder) == sorted((before, after))


def test_older_versions_go_but_the_one_before(installed: Hooks) -> None:
    first, second = "0.0.1-aaaaaaaaaaaa", "0.0.2-bbbbbbbbbbbb"
    for name in (first, second):
        (installed.folder / name / "lib").mkdir(parents=True)
    (installed.folder / "current").symlink_to(second)
    own = hooks_version(installed.config)

    assert installed.read() == second
    installed.write(Wanted.PRESENT)
    assert versions.list_hook_versions(installed.folder) == [second, own]
    current = installed.folder / "current"
    current.unlink()
    current.symlink_to(first)
    assert installed.read() == f"{first} (its folder is gone)"
    current.unlink()
    current.touch()
    with pytest.raises(InstallError, match="current: it is no link; remove it"):
        installed.read()


@pytest.mark.root
def test_a_folder_that_others_may_write_is_refused(installed: Hooks) -> None:
    installed.folder.mkdir(parents=True)
    installed.folder.chmod(0o777)

    with pytest.raises(InstallError, match="hooks run as root"):
        installed.write(Wanted.PRESENT)


@pytest.mark.parametrize("hook", ["profile.sh", "sge-starter", "sge_shepherd"])
def test_shell_hooks_parse(hook: str) -> None:
    root = Path(__file__).parents[3]

    done = subprocess.run(["sh", "-n", root / "prolog" / hook], check=False, timeout=60)

    assert done.returncode == 0


# --- another Python ------------------------------------------------------------------------------


def renew(config: Path) -> str:
    """Render the hooks again; return what is said."""
    done = command_runner().invoke(command_group, ["--config", str(config), "install", "hooks"])
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("schedulers", [(SGE, SLURM), (SLURM,)])
def test_hooks_whose_python_went_with_an_upgrade_run_by_the_new_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, schedulers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(versions, "_TRIALS", {SGE: ignore, SLURM: ignore})
    settings, old = read_settings(str(config)), config.with_name("python3.old")
    shutil.copy(hooks_python(), old)
    Path(settings.state_dir).mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(old))
        for name in schedulers:
            Path(settings.state_dir, f"{name}-map").touch()
            Hooks(settings, name).write(Wanted.PRESENT)
    paths = current_hooks(settings)
    named = (paths.prolog, paths.folder / PODMAN_PROGRAM)
    assert all(hook.read_text().startswith(f"#!{old} ") for hook in named)
    old.unlink()

    assert renew(config) == f"done: {Hooks(settings).title}\n"
    for hook in named:
        assert hook.read_text().startswith(f"#!{hooks_python()} -IS\n")
    assert renew(config) == ""


def test_hooks_whose_maps_were_lost_are_not_renewed_without_a_word(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_TRIALS", {SLURM: ignore})
    assert renew(config) == "", "none are here"
    settings = read_settings(str(config))
    Path(settings.state_dir).mkdir(exist_ok=True)
    Hooks(settings, SLURM).write(Wanted.PRESENT)
    (current_hooks(settings).folder / "epilog/slurm").write_text("")
    done = command_runner().invoke(command_group, ["--config", str(config), "install", "hooks"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"no map in {settings.state_dir}" in done.stderr
    assert done.stderr.endswith(f" --config {config} install sge or slurm\n")


# --- modules come from one compiled file, and from their own without it ---------------------------

REPORT = """    import json
    ours = {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "gpulock"}
    alone = sorted(name for name, one in ours.items() if one.__spec__)
    os.write(1, json.dumps({"ours": sorted(ours), "alone": alone, **more}).encode())
    os._exit(0)
"""
PROLOG = "gpulock.sge.prolog"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> HookPaths:
    root = tmp_path_factory.mktemp("preload")
    return render_hooks(root / "hooks", write_simulated_node(root / "node", "workstation").config)


@pytest.fixture
def preload(rendered: HookPaths) -> Iterator[Path]:
    """Give the file of the prolog of Grid Engine, and put it back."""
    path = rendered.library / f"{preload_name('sge.prolog')}.pyc"
    whole = path.read_bytes()
    yield path
    path.write_bytes(whole)


def loaded(hooks: HookPaths, name: str = "prolog/sge", extra: str = "more = {}") -> dict[str, Any]:
    """Run a hook up to the call of its main, then `extra`; return its modules, and `more`.

    Those that were loaded `alone`, from a file of their own, have a spec.
    """
    text = (hooks.folder / name).read_text()
    head, main, _ = text.partition('if __name__ == "__main__":\n')
    script = hooks.folder / "variant"
    script.write_text(f"{head}{main}    {extra}\n{REPORT}")
    done = subprocess.run(
        [sys.executable, "-IS", str(script)], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", HOOKS)
def test_an_installed_hook_loads_no_module_from_a_file_of_its_own(
    rendered: HookPaths, name: str
) -> None:
    modules = loaded(rendered, name)

    assert f"gpulock.{HOOKS[name][1]}" in modules["ours"]
    assert modules["alone"] == []


def test_tracebacks_and_debuggers_show_the_sources(rendered: HookPaths) -> None:
    more = (
        "import inspect, linecache, traceback\n"
        "    try:\n        main(None, None, None)\n"
        "    except BaseException:\n        trace = traceback.format_exc()\n"
        "    more = {'trace': trace, 'source': inspect.getsource(main)}"
    )

    shown = loaded(rendered, extra=more)
    assert f'File "{rendered.library}/gpulock/sge/prolog.py", line ' in shown["trace"]
    line = shown["trace"].partition("in main\n    ")[2].partition("\n")[0]
    assert line and line in (rendered.library / "gpulock/sge/prolog.py").read_text()
    assert shown["source"].startswith("def main(")


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:1000],
        lambda data: data[:10],
        lambda data: data.replace(importlib.util.MAGIC_NUMBER, b"\xff\xff\r\n", 1),
        lambda _: b"",  # a disk was full
        None,
    ],
)
def test_a_hook_does_without_a_file_that_is_of_no_use_or_gone(
    rendered: HookPaths, preload: Path, harm: Callable[[bytes], bytes] | None
) -> None:
    if harm:
        preload.write_bytes(harm(preload.read_bytes()))
    else:
        preload.unlink()

    modules = loaded(rendered)
    assert PROLOG in modules["alone"] and modules["alone"] == modules["ours"]
