# SPDX-License-Identifier: Apache-2.0
"""gpulock's SPANK plugin: compiled on the node, for its Slurm, from prolog/spank/spank_gpulock.c.

Slurm loads a plugin of its own major and minor release alone, so there is no binary to ship. It
runs the TaskProlog hook on the node, where pyxis would run it inside a container.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.change import Place, discard_unrenamed
from gpulock.install.hooks import (
    InstallError,
    find_share_folder,
    make_public_folder,
    remove_file_durably,
    run_program,
)
from gpulock.install.slurm.site import SlurmSite, find_slurm_program
from gpulock.store import atomic

SOURCE: Final = "prolog/spank/spank_gpulock.c"
HEADER: Final = "slurm/spank.h"
_MARK: Final = re.compile(rb"gpulock-spank-build ([ -~]{1,200})\0")
_LARGEST: Final = 1 << 22  # bytes of a plugin
_PATH: Final = "/usr/bin:/bin:/usr/local/bin"
_SYSTEM: Final = (Path("/usr"), Path("/usr/local"))
_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-fstack-protector-strong")
_SECONDS: Final = 60.0
_BESIDE: Final = ".spank."  # begins the name of the folder in which one is compiled
_LOAD: Final = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_LAZY)"


@dataclass(frozen=True)
class SpankPlugin(Place):
    """The compiled plugin; its value names Slurm's release and what it was made from."""

    path: Path
    hook: Path = Path()
    site: SlurmSite | None = None
    interpreter: str = ""
    kind, coordinates, named = "spank", ("path",), "SPANK plugin {path}"

    def wanted(self, release: tuple[int, int]) -> str:
        """Return the value of one that this package would compile."""
        source = spank_source().read_bytes()
        made = hashlib.sha256(b"%s\0%s" % (source, os.fsencode(self.hook))).hexdigest()[:12]
        return f"Slurm {release[0]}.{release[1]:02} {made}"

    def read(self) -> str | None:
        try:
            found = _MARK.search(atomic.read_file(str(self.path), _LARGEST))
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault.strerror}; look at it") from fault
        return found[1].decode() if found else "another program"

    def write(self, value: str | None) -> None:
        try:
            if value is None:
                remove_file_durably(self.path)
                return
            if self.site is None or value != self.wanted(self.site.release()):
                raise InstallError(f"{self.path} of {value} cannot be had again; remove it")
            make_public_folder(self.path.parent)
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=_BESIDE) as folder:
                made = Path(folder, self.path.name)
                self._compile(made, value)
                program = made.read_bytes()
            # once nothing is left beside it: where this is cut short, the next run has it to do
            atomic.replace_file(str(self.path), program, 0o644, durable=True)
        except OSError as fault:
            raise InstallError(f"{self.path}: {fault}; are you root?") from fault

    def discard_leftovers(self) -> None:
        discard_unrenamed(self.path.parent, self.path.name)
        try:
            for folder in self.path.parent.glob(f"{_BESIDE}*"):
                shutil.rmtree(folder)
        except OSError as fault:
            raise InstallError(f"{fault.filename}: {fault.strerror}; are you root?") from fault

    def _compile(self, made: Path, value: str) -> None:
        """Compile the plugin, and load it as a trial; raise OSError or InstallError."""
        assert self.site is not None
        major, minor = self.site.release()
        defines = [
            f'-DGPULOCK_HOOK="{self.hook}"',
            f'-DGPULOCK_BUILD="{value}"',
            f"-DGPULOCK_SLURM={(major << 8) + minor}",
        ]
        compiler, include = find_compiler(), find_spank_header(self.site)
        command: list[str | Path] = [
            compiler,
            *_FLAGS,
            f"-I{include}",
            *defines,
            "-o",
            made,
            spank_source(),
        ]
        _must_run(command, "compiled")
        _must_run([self.interpreter, "-IS", "-c", _LOAD, made], "loaded")


def _must_run(command: Sequence[str | Path], what: str) -> None:
    """Run a program; raise OSError, or InstallError with the first error it tells."""
    try:
        done = run_program(command, _SECONDS, {"PATH": _PATH})
    except subprocess.TimeoutExpired as late:
        raise InstallError(f"the SPANK plugin is not {what} within {_SECONDS:.0f} s") from late
    if done.returncode != 0:
        said = done.stderr.splitlines()
        why = next((line for line in said if "error" in line.lower()), (said or ["?"])[0])
        raise InstallError(f"the SPANK plugin cannot be {what}: {why[:300]}")


def spank_source() -> Path:
    """Return where the plugin's source is."""
    return find_share_folder() / SOURCE


def find_compiler() -> Path:
    """Return a C compiler; raise InstallError."""
    folders = [Path(folder) for folder in _PATH.split(":")]
    for name in _COMPILERS:
        try:
            return find_slurm_program(name, folders, "")
        except InstallError:
            continue
    raise InstallError(
        "no C compiler (cc, gcc or clang): --spank compiles a plugin for this node's Slurm; install"
        " gcc, or compile on another node of this release and copy the file"
    )


def find_spank_header(site: SlurmSite) -> Path:
    """Return the folder of slurm/spank.h for this node's Slurm; raise InstallError."""
    tops = [site.slurmd.parent.parent, site.binaries.parent, *_SYSTEM]
    folders = list(dict.fromkeys(top / "include" for top in tops))
    for folder in folders:
        if (folder / HEADER).is_file():
            if os.geteuid() == 0 and (why := why_untrusted_program(folder / HEADER, (0,))):
                raise InstallError(f"{folder / HEADER} is not compiled: {why}; fix it")
            return folder
    places = " ".join(map(str, folders))
    raise InstallError(
        f"no {HEADER} in {places}: --spank compiles a plugin for this node's Slurm; install its"
        " development package (libslurm-dev, slurm-devel)"
    )
