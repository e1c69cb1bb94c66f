# SPDX-License-Identifier: Apache-2.0
"""Slurm's hooks are tried before they are in force, that of a task as a user."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.hooks import hooks_python, render_hooks
from gpulock.install.trial import try_slurm_hooks
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import be_real
from tests.support.trees import public_place

pytestmark = [pytest.mark.slow, pytest.mark.another_user]  # who runs the tests' interpreter


@pytest.fixture
def public() -> Iterator[Path]:
    with public_place() as folder:
        yield folder


def settings(folder: Path) -> Path:
    """Return settings of a node that is not simulated: hooks of users work on no other."""
    config = write_simulated_node(folder / "node", "workstation").config
    be_real(config)
    return config


def test_hooks_that_everybody_may_run_pass_and_damaged_ones_do_not(public: Path) -> None:
    paths = render_hooks(public / "hooks", settings(public))
    try_slurm_hooks(paths)
    for hook in (paths.slurm_prolog, paths.slurm_epilog):
        whole = hook.read_text()
        hook.write_text("#!/bin/sh\nexit 9\n")
        with pytest.raises(InstallError, match=rf"self-test: {hook} ended with 9"):
            try_slurm_hooks(paths)
        hook.write_text(whole)


@pytest.mark.root
@pytest.mark.parametrize("private", ["gpulock.conf", "hooks", "hooks/prolog/slurm-task", "bin"])
def test_what_a_user_cannot_read_or_run_is_found(
    public: Path, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    """Settings, folder, hook, interpreter: every task of every job would fail."""
    config = settings(public)
    (public / "gpulock.conf").symlink_to(config)
    python = public / "bin/python3"
    python.parent.mkdir()
    shutil.copy(hooks_python(), python)
    monkeypatch.setattr("gpulock.install.hooks.sys.executable", str(python))
    paths = render_hooks(public / "hooks", config)
    try_slurm_hooks(paths)
    (public / private).chmod(0o700)

    says = r"slurm-task as nobody.*Permission denied|slurm-task cannot be run: Permission denied"
    with pytest.raises(InstallError, match=rf"({says}).*: tasks run as their user"):
        try_slurm_hooks(paths)
