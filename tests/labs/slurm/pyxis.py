# SPDX-License-Identifier: Apache-2.0
"""A Slurm lab whose steps may run in containers: a stand-in for pyxis, and gpulock's SPANK plugin.

Both are compiled for the lab's Slurm, gpulock's by its Makefile. With
GPULOCK_PYXIS the real pyxis takes the place of the stand-in (tests/labs/slurm/enroot.py).
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.spank import AGAIN, PlugStack, build_mark
from gpulock.install.versions import PLUGIN
from tests.labs.slurm.enroot import SOURCES, build_pyxis
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, Mode

SOURCE: Final = Path(__file__).with_name("spank_pyxis.c")
HOST: Final = ("usr", "bin", "lib", "lib64", "dev", "proc", "etc")
IMAGE_MASK: Final = (
    "CUDA_VISIBLE_DEVICES=9\nNVIDIA_VISIBLE_DEVICES=all\nGPULOCK_DEVICES=GPU-of-image\n"
)


@dataclass(frozen=True)
class Pyxis:
    """The plugins of a lab, and an image; `lines` are those that the installer asks for."""

    gpus: Gpulock
    plugin: Path
    pyxis: Path
    image: Path
    hook: Path

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines of plugstack.conf."""
        above = f"required {self.plugin}"
        return (above, f"required {self.pyxis}", f"{above} {AGAIN}")

    @property
    def plugstack(self) -> Path:
        """Return the lab's plugstack.conf, which a step daemon reads as it starts."""
        return self.gpus.slurm.lab / "etc/plugstack.conf"

    def stack(self, *lines: str) -> None:
        """Write plugstack.conf."""
        self.plugstack.write_text("".join(f"{line}\n" for line in lines))

    def make_place(self, path: Path) -> None:
        """Make a place in the image for a mount; the real pyxis makes its own."""
        if self.image.is_dir():
            place = self.image / str(path).removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()

    def inside(
        self, *words: str, command: Sequence[str] = ("env",), **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a step of slalice in the container."""
        image = f"--container-image={self.image}"
        return self.gpus.slurm.srun("slalice", *words, image, *command, **more)


@contextlib.contextmanager
def with_pyxis(
    gpus: Gpulock, mode: Mode, task_prolog: bool = False, **keys: str
) -> Generator[Pyxis]:
    """Give a test such a lab, and take the plugins away again."""
    lab = gpus.slurm.lab
    hooks = {
        name: hook for name, hook in gpus.setup.hooks.items() if task_prolog or name != "TaskProlog"
    }
    mode(gpus, keys, hooks=hooks)
    hook = HookPaths(lab / "hooks").slurm_task
    plugin = lab / PLUGIN
    if not plugin.exists() or build_mark(hook) not in plugin.read_bytes():
        left = PlugStack(SlurmConf({}), lab / "slurm.conf").remainder(plugin, hook)
        assert left
        make = next(line for line in left.page if line.startswith("    make "))
        subprocess.run([*shlex.split(make), f"HOOK={hook}"], check=True)
    assert build_mark(hook) in plugin.read_bytes()
    if SOURCES:
        pyxis, image = build_pyxis(gpus.slurm, NODE, {"etc/environment": IMAGE_MASK})
    else:
        pyxis, image = build_stand_in(lab)
    made = Pyxis(gpus, plugin, pyxis, image, hook)
    made.stack(*made.lines)
    try:
        yield made
        gpus.slurm.clear_jobs()
    finally:
        made.plugstack.unlink()


def build_stand_in(lab: Path) -> tuple[Path, Path]:
    """Compile the stand-in; return it and an image of empty places for what the host has."""
    pyxis, image = lab / "spank_pyxis.so", lab / "pyxis-image"
    build: list[str | Path] = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*build, "-o", pyxis, SOURCE], check=True, timeout=60)
    for name in HOST:
        (image / name).mkdir(parents=True, exist_ok=True)
    (image / "tmp").mkdir(exist_ok=True)
    (image / "tmp").chmod(0o1777)
    (image / "etc/environment").write_text(IMAGE_MASK)
    return pyxis, image
