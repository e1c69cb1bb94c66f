# SPDX-License-Identifier: Apache-2.0
"""`prolog/drop-env`, which starts the hooks of Grid Engine: of the package, else compiled here.

It is compiled without a C library, so a compiler alone is enough: `cc`, or the wheel of ziglang.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpulock.install.files import InstallError, find_share_folder, run_program

DROP_ENV: Final = "drop-env"
SOURCE: Final = f"{DROP_ENV}.c"
FLAGS: Final = (
    *("-std=gnu11", "-Os", "-Wall", "-Wextra", "-s", "-static", "-nostdlib", "-ffreestanding"),
    *("-fno-pie", "-no-pie", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"),
    *("-Wl,--build-id=none", "-Wl,-z,noexecstack"),
)
_SECONDS: Final = 60.0
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
MISSING: Final = (
    f"prolog/{DROP_ENV}, by which Grid Engine's hooks start: no C compiler here: install gcc, or"
    " ziglang by pip into gpulock's Python"
)


def find_compiler() -> list[str]:
    """Return the command of a C compiler, nothing where there is none."""
    if compiler := shutil.which("cc", path=_PATH):
        return [compiler]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return []


def compile_drop_env(source: Path, compiler: Sequence[str]) -> bytes:
    """Return the program that a compiler makes of its source; raise InstallError."""
    with tempfile.TemporaryDirectory(prefix="gpulock-cc-") as folder:
        made = Path(folder, DROP_ENV)
        env = {"PATH": _PATH, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        command = [*compiler, *FLAGS, "-o", str(made), str(source)]
        done = run_program(command, _SECONDS, env)
        if done.returncode or not made.exists():
            said = done.stderr.splitlines()
            why = next((line for line in said if "error" in line), "?")[:300]
            raise InstallError(f"{source} cannot be compiled: {why}")
        return made.read_bytes()


@functools.cache
def drop_env_program(share: Path | None = None) -> bytes:
    """Return the program for this machine; raise InstallError.

    `share` has the source, and in a package the program.
    """
    share = share or find_share_folder() / "prolog"
    packaged = share / DROP_ENV
    if packaged.exists():
        return packaged.read_bytes()
    if not (compiler := find_compiler()):
        raise InstallError(MISSING)
    return compile_drop_env(share / SOURCE, compiler)
