# SPDX-License-Identifier: Apache-2.0
"""A program of gpulock starts another, from a package as from any other installation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import build
import pytest

import gpulock
from gpulock.daemon.core import own_program


@pytest.mark.parametrize("packaged", [False, True])
def test_another_process_runs_a_module_of_this_gpulock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: bool
) -> None:
    if packaged:
        build.write_programs(tmp_path, "opt")
        library = tmp_path / "opt" / build.LIBRARY
        (library / "gpulock").symlink_to(Path(gpulock.__file__).parent)
        monkeypatch.setattr(gpulock, "__file__", str(library / "gpulock/__init__.py"))

    command = [*own_program.module_command("gpulock.daemon.app"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == (f"gpulockd {gpulock.__version__}\n", "")
    assert (str(tmp_path) in " ".join(command)) is packaged
