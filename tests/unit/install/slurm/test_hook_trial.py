# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks are tried before they are in force, that of a task as a user."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.hooks import hooks_python, render_hooks
from gpulock.install.items import Wanted
from gpulock.install.trial import (
    try_slurm_hooks,
    why_users_cannot_run,
)
from gpulock.install.versions import SLURM, Hooks, version_in_force
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import be_real

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
    be_real(config)
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
        return {"prolog/slurm": "#!/bin/sh\n", "prolog/slurm-task": "#!/bin/sh\n"}

    config = write_simulated_node(public / "node", "workstation").config
    monkeypatch.setattr("gpulock.install.hooks.render_hook_scripts", scripts)
    hooks = Hooks(read_settings(str(config)), SLURM)

    with pytest.raises(InstallError, match="nothing was put in force"):
        hooks.write(Wanted.PRESENT)

    assert version_in_force(hooks.folder) is None


def test_an_interpreter_below_a_private_folder_is_refused(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = public / "root"
    home.mkdir(mode=0o700)
    python = home / "python3"
    shutil.copy(hooks_python(), python)
    monkeypatch.setattr("gpulock.install.hooks.sys.executable", str(python))
    paths = render_hooks(public / "hooks", settings(public))

    with pytest.raises(InstallError, match=r"users may not enter .*/root; .* with 127"):
        try_slurm_hooks(paths)


def test_a_program_that_only_root_may_run_is_private(public: Path) -> None:
    program = public / "program"
    program.touch(0o750)
    program.chmod(0o750)

    assert "mode 0750: users may not run it" in why_users_cannot_run(program)
    assert "No such file" in why_users_cannot_run(public / "none")
