# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks are tried before they are in force, that of a task as a user."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install import versions
from gpulock.install.hooks import InstallError, real_interpreter, render_hooks
from gpulock.install.trial import (
    check_hook_interpreter,
    try_slurm_hooks,
    why_users_cannot_run,
)
from gpulock.install.versions import InstalledHooks, version_in_force
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore

pytestmark = [pytest.mark.slow, pytest.mark.another_user]  # who runs the tests' interpreter


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that any user may enter; tmp_path is its owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="gpulock-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def settings(folder: Path) -> Path:
    """Return settings of a node that is not simulated: hooks of users work on no other."""
    config = write_simulated_node(folder / "node", "workstation").config
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("SIMULATION")))
    return config


def test_hooks_that_everybody_may_run_pass(public: Path) -> None:
    config = settings(public)

    try_slurm_hooks(render_hooks(public / "hooks", config))


def test_hooks_below_a_private_folder_are_refused(public: Path) -> None:
    paths = render_hooks(public / "hooks", public / "none.conf")
    paths.folder.chmod(0o700)

    with pytest.raises(InstallError, match=rf"users may not enter {paths.folder}"):
        try_slurm_hooks(paths)


@pytest.mark.root
def test_settings_that_a_user_cannot_read_are_found(public: Path) -> None:
    config = settings(public)
    config.chmod(0o600)

    with pytest.raises(InstallError, match=r"slurm-task as nobody .*Permission denied"):
        try_slurm_hooks(render_hooks(public / "hooks", config))


def test_a_damaged_hook_is_not_put_in_force(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scripts(*_: object) -> dict[str, str]:
        return {"prolog/slurm": "#!/bin/sh\n"}

    config = write_simulated_node(public / "node", "workstation").config
    monkeypatch.setattr(versions, "self_test_sge_hooks", ignore)
    monkeypatch.setattr("gpulock.install.hooks.render_hook_scripts", scripts)
    place = InstalledHooks(
        public / "libexec", config, sys.executable, public / "run", try_slurm_hooks
    )

    with pytest.raises(InstallError):
        place.write(place.wanted())

    assert version_in_force(public / "libexec") is None


def test_an_interpreter_below_a_private_folder_is_refused(public: Path) -> None:
    home = public / "root"
    home.mkdir(mode=0o700)
    python = home / "python3"
    shutil.copy(real_interpreter(sys.executable), python)

    with pytest.raises(InstallError, match=r"users may not enter .*/root: every task .* with 127"):
        check_hook_interpreter(str(python))


def test_an_interpreter_that_is_everybodys_is_taken() -> None:
    check_hook_interpreter(real_interpreter(sys.executable))


def test_a_program_that_only_root_may_run_is_private(public: Path) -> None:
    program = public / "program"
    program.touch(0o750)
    program.chmod(0o750)

    assert "mode 0750: users may not run it" in why_users_cannot_run(program)
    assert "No such file" in why_users_cannot_run(public / "none")
