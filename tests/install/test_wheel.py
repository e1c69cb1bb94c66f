# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed as an administrator installs it, has everything the hooks need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.install.roots import copy_demo

pytestmark = pytest.mark.install
ROOT = Path(__file__).resolve().parents[2]
PAGE = re.compile(r"(?<![\w/.-])docs/((?:facts/)?[\w-]+\.md)")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command with a bare environment; return what it printed."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_in_a_venv_of_its_own_runs_a_job(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    place = tmp_path / "opt"
    venv.create(place, with_pip=False)
    python = place / "bin/python3"
    wheel = next(tmp_path.glob("gpulock-*.whl"))
    sources = "".join(path.read_text() for path in (ROOT / "gpulock").rglob("*.py"))
    cited = {f"gpulock/share/docs/{name}" for name in PAGE.findall(sources)}
    assert len(cited) > 10
    assert cited <= {*zipfile.ZipFile(wheel).namelist()}
    run(*pip, "--python", python, "install", "-q", wheel, cwd=tmp_path)
    gpulock = place / "bin/gpulock"
    run(gpulock, "simulate", tmp_path / "node", "--for-scheduler", cwd=tmp_path)
    (tmp_path / "node").rename(tmp_path / "other")
    run(gpulock, "simulate", tmp_path / "node", cwd=tmp_path)
    config = tmp_path / "node/gpulock.conf"
    assert "8 GPUs: 8 free" in run(gpulock, "--config", config, "status", cwd=tmp_path)
    copy_demo(tmp_path)
    shown = run(python, "-m", "tests.demo", cwd=tmp_path)
    assert "CUDA_VISIBLE_DEVICES=0,3" in shown and shown.count("8 GPUs: 8 free") == 1
    assert str(ROOT) not in shown
    (source,) = place.rglob("share/prolog/spank/spank_gpulock.c")
    assert source.read_text() == (ROOT / "prolog/spank/spank_gpulock.c").read_text()
