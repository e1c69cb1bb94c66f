# SPDX-License-Identifier: Apache-2.0
"""The real pyxis and enroot, built from their public sources, on one node of the Slurm lab.

GPULOCK_PYXIS names a folder with checkouts of NVIDIA/pyxis and NVIDIA/enroot, `pyxis` and `enroot`.
enroot's small programs are compiled with the machine's own compiler and C library. There is no
driver: a program in the place of nvidia-container-cli notes how enroot's hook calls it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.labs.slurm.lab import Slurm

SOURCES: Final = os.environ.get("GPULOCK_PYXIS", "")
_HELPERS: Final = ("aufs2ovlfs", "mksquashovlfs", "mount", "switchroot", "nsenter")
_APPLETS: Final = ("sh", "env", "echo", "ls", "cat", "sleep", "id")
_CONF: Final = """\
ENROOT_RUNTIME_PATH /run/enroot/user-$(id -u)
ENROOT_DATA_PATH {top}/data-$(id -u)
ENROOT_CACHE_PATH {top}/cache-$(id -u)
ENROOT_TEMP_PATH /tmp
"""


def build_pyxis(slurm: Slurm, node: str, image_files: dict[str, str]) -> tuple[Path, Path]:
    """Build all, make it known to a node; return the plugin and an image with some files."""
    top = slurm.lab / "enroot"
    plugin, image = top / "spank_pyxis.so", top / "image.sqsh"
    if not plugin.exists():
        _build_enroot(Path(SOURCES, "enroot"), top)
        shutil.copytree(Path(SOURCES, "pyxis"), top / "pyxis")
        _run("make", "-C", top / "pyxis")
        shutil.copy(top / "pyxis/spank_pyxis.so", plugin)
        _make_image(top / "image", image, image_files)
    on = slurm.path_in(node, "/run")
    (on / "pyxis").mkdir(exist_ok=True)  # slurmd, when it starts with the plugin
    (on / "enroot").mkdir(exist_ok=True)
    (on / "enroot").chmod(0o1777)
    if slurm.run_in(node, ["mountpoint", "-q", "/usr/local/sbin"]).returncode != 0:
        slurm.run_in(node, ["mount", "--bind", str(top / "bin"), "/usr/local/sbin"])
    return plugin, image


def cli_calls(slurm: Slurm) -> list[str]:
    """Return how enroot's hook called nvidia-container-cli, and forget it."""
    log = slurm.lab / "enroot/cli.log"
    if not log.exists():
        return []
    found = log.read_text().splitlines()
    log.write_text("")
    return found


def _build_enroot(source: Path, top: Path) -> None:
    for name in ("bin", "lib", "etc/hooks.d", "etc/mounts.d", "etc/environ.d"):
        (top / name).mkdir(parents=True)
    top.chmod(0o1777)  # users keep their containers here
    script = (source / "enroot.in").read_text()
    for name, value in (("sysconfdir", top / "etc"), ("libdir", top / "lib"), ("version", "4")):
        script = script.replace(f"@{name}@", str(value))
    (top / "bin/enroot").write_text(script)
    for helper in _HELPERS:
        out = top / f"bin/enroot-{helper}"
        build = ("gcc", "-O2", "-D_GNU_SOURCE", "-w", "-o", out)
        _run(*build, source / f"bin/enroot-{helper}.c", "-lcap", "-lbsd")
    for folder, into in (
        ("src", "lib"),
        ("conf/hooks", "etc/hooks.d"),
        ("conf/mounts", "etc/mounts.d"),
    ):
        for path in (path for path in (source / folder).iterdir() if path.is_file()):
            shutil.copy(path, top / into)
    (top / "etc/hooks.d/99-mellanox.sh").unlink()
    (top / "etc/enroot.conf").write_text(_CONF.format(top=top))
    log = top / "cli.log"
    log.touch()
    log.chmod(0o666)
    cli = top / "bin/nvidia-container-cli"
    cli.write_text(f'#!/bin/sh\necho "$*" >>{log}\n')
    for path in (top / "bin").iterdir():
        path.chmod(0o755)


def _make_image(tree: Path, image: Path, files: dict[str, str]) -> None:
    for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr/bin", "var"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", tree / "bin/busybox")
    for applet in _APPLETS:
        (tree / "bin" / applet).symlink_to("busybox")
    for name, text in files.items():
        (tree / name).write_text(text)
    _run("mksquashfs", tree, image, "-all-root", "-noappend", "-quiet")


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-1500:]}"
