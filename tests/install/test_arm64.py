# SPDX-License-Identifier: Apache-2.0
"""The package of aarch64, on a Debian of that machine which QEMU plays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import build
import pytest

from gpulock import __version__
from tests.install.roots import ROOT, EmulatedMachine, copy_demo

pytestmark = [pytest.mark.install, pytest.mark.soak, pytest.mark.root, pytest.mark.timeout(900)]
PYTHON: Final = f"PYTHONPATH=/{build.USR}/{build.LIBRARY} python3"
# No script of Debian's packages has run here.
PREPARE: Final = """
echo root:x:0:0:root:/root:/bin/bash >/etc/passwd
echo root:x:0: >/etc/group
touch /var/lib/dpkg/status
ldconfig
"""
# A trial's hostile environment would end QEMU itself, whose C library reads it.
INSTALL_HOOKS: Final = """
from pathlib import Path
from gpulock.install import trial
from gpulock.install.items import Wanted, run_items
from gpulock.install.versions import SGE, SLURM, Hooks
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
trial._HOSTILE.clear()
settings = read_settings(DEFAULT_PATH)
for scheduler in (SGE, SLURM):
    run_items([Hooks(settings, scheduler)], Wanted.PRESENT, Path(settings.state_dir), print)
    Path(settings.state_dir, f"{scheduler}-map").touch()
"""


def test_package_hooks_and_demo_run_on_aarch64(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    program = [sys.executable, str(ROOT / "packaging/build.py"), str(folder), "--machine", "arm64"]
    subprocess.run(program, check=True, timeout=600)
    (folder / "hooks.py").write_text(INSTALL_HOOKS)
    copy_demo(folder / "opt")
    (tmp_path / "machine").mkdir()
    machine = EmulatedMachine(tmp_path / "machine", folder)
    machine.run(PREPARE)

    assert machine.run("uname -m") == "aarch64\n"
    machine.run("dpkg -i --force-depends /mnt/gpulock_*_arm64.deb")
    assert machine.run("gpulock --version") == f"gpulock {__version__}\n"
    said = machine.run(f"{PYTHON} /mnt/hooks.py")
    assert "done: hooks /usr/lib/gpulock/hooks/current" in said, "each was tried"
    assert "8 GPUs: 8 free" in machine.run(f"cd /mnt/opt; {PYTHON} -m tests.demo")
