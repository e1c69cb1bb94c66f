# SPDX-License-Identifier: Apache-2.0
"""Build the double of NVIDIA's management library: once on a machine, about a second with gcc.

What is built lies in a folder of this user's below the system's temporary one, under a name made
of the sources, the flags and the C library: a change builds anew, a second process finds it ready.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pynvml

from tests.nvml.cards import FIRST_BRANCH
from tests.root.build import MARK

SOURCES = Path(__file__).resolve().parent
SONAME = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror")
# Their real parameters do not matter: only a handle that comes first is looked at.
REFUSED = """#include "double.h"
static nvmlReturn_t refuse(const char *function, void *first)
{
    nvmlDevice_t device = first;
    nvmlReturn_t status = is_handle(device) ? begin(function, device) : begin_system(function);
    return end(status == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : status);
}
"""


class BuildError(RuntimeError):
    """Say what the compiler said."""


def library(hidden: Iterable[str] = ()) -> Path:
    """Return the library; the functions in `hidden` are not in it, as in that of an old driver."""
    names = sorted(set(hidden))
    place = cache() / f"{_digest()}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]}"
    built = place / SONAME
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            _link(_objects(), names, Path(scratch) / "new")
            _publish(Path(scratch) / "new", place)
    return built


def cache() -> Path:
    """Return this user's folder for what is built; raise BuildError when it is somebody else's."""
    base = Path(tempfile.gettempdir())
    shared = SOURCES.parents[1] / "build"  # of every step, where each has a /tmp of its own
    if (Path("/") / MARK).exists() and os.access(shared, os.W_OK):
        base = shared
    folder = base / f"gpulock-nvml-{os.geteuid()}-{platform.libc_ver()[1]}"
    folder.mkdir(mode=0o755, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(f"{folder} is not this user's alone: remove it")
    return folder


def run_compiler(*words: str | Path, folder: Path = SOURCES) -> None:
    """Run gcc in a folder; raise BuildError with its words when it fails."""
    compiler = ["cc"] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    command = [*compiler, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def sources() -> list[Path]:
    """Return the files in C."""
    return sorted(SOURCES.glob("*.c"))


@functools.cache
def refused_source() -> str:
    """Return the rest of the library's functions: the card does not support what they ask.

    They are counted, and fail, wait, hang or crash as told, like any other.
    """
    text = "".join(path.read_text() for path in sources())
    written = set(
        re.findall(r"^(?:nvmlReturn_t |const char \*|[A-Z]+_CALL\()(nvml\w+)", text, re.M)
    )
    binding = Path(pynvml.__file__).read_text()
    called = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"', binding))
    names = sorted({*FIRST_BRANCH, *called} - written)
    lines = [f"nvmlReturn_t {n}(void *first) {{ return refuse(__func__, first); }}" for n in names]
    return "\n".join([REFUSED, *lines, ""])


def _digest() -> str:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""  # a Debian root with another shares the folder
    digest = hashlib.sha256(" ".join((*FLAGS, libc, refused_source())).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _objects() -> list[Path]:
    """Return the compiled sources, which every variant of the library is linked from."""
    place = cache() / f"{_digest()}-objects"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            refused = Path(scratch) / "refused.c"
            refused.write_text(refused_source())
            run_compiler(*FLAGS, f"-I{SOURCES}", "-c", *sources(), refused, folder=new)
            _publish(new, place)
    return sorted(place.glob("*.o"))


def _link(objects: list[Path], hidden: list[str], folder: Path) -> None:
    """Link the library into `folder`. A name written out in the map beats the pattern."""
    folder.mkdir()
    exports = folder / "exports.map"
    local = "".join(f"{name}; " for name in hidden)
    exports.write_text(f"{{ global: nvml*; local: {local}*; }};\n")
    run_compiler(
        "-shared",
        f"-Wl,-soname,{SONAME}",
        f"-Wl,--version-script,{exports}",
        *("-o", folder / SONAME),
        *objects,
        "-lm",
        "-pthread",
    )


def _publish(new: Path, place: Path) -> None:
    """Give `new` its name, unless another process was faster."""
    try:
        new.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(new)


if __name__ == "__main__":
    print(library(sys.argv[1:]))
