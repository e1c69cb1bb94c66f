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
from gpulock.install.trial import (
    try_slurm_hooks,
    why_users_cannot_run,
)
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


def test_hooks_that_everybody_may_run_pass_and_damaged_or_private_ones_do_not(public: Path) -> None:
    paths = render_hooks(public / "hooks", settings(public))
    try_slurm_hooks(paths)
    for hook in (paths.slurm_prolog, paths.slurm_epilog):
        whole = hook.read_text()
        hook.write_text("#!/bin/sh\nexit 9\n")
        with pytest.raises(InstallError, match=rf"self-test: {hook} ended with 9"):
            try_slurm_hooks(paths)
        hook.write_text(whole)
    paths.slurm_task.chmod(0o750)
    assert "mode 0750: users may not run it" in why_users_cannot_run(paths.slurm_task)
    paths.folder.chmod(0o700)

    with pytest.raises(InstallError, match=rf"users may not enter {paths.folder}"):
        try_slurm_hooks(paths)


@pytest.mark.root
def test_settings_that_a_user_cannot_read_are_found(public: Path) -> None:
    config = settings(public)
    config.chmod(0o600)

    with pytest.raises(InstallError, match=r"slurm-task as nobody .*Permission denied"):
        try_slurm_hooks(render_hooks(public / "hooks", config))


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
