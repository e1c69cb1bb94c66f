# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of whatever scheduler brings along: it logs as whom it was run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PRELOAD = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void told(void)
{
    int fd = open(LOG, O_WRONLY | O_APPEND);
    if (fd >= 0) {
        dprintf(fd, "uid=%d euid=%d library\n", (int)getuid(), (int)geteuid());
        close(fd);
    }
}
"""
PYTHON = """
import os
with open({log!r}, "a") as log:
    log.write(f"uid={{os.getuid()}} euid={{os.geteuid()}} {name}\\n")
"""
SHADOW = """#!/bin/bash
echo "uid=$(/usr/bin/id -u) euid=$EUID fake {name}" >>{log}
exec /usr/bin/{name} "$@"
"""


@dataclass(frozen=True)
class Kit:
    """The kit, in a folder that everybody may read."""

    folder: Path

    @property
    def log(self) -> Path:
        """Who ran something of it: lines `uid=N euid=N what`."""
        return self.folder / "log"

    @property
    def programs(self) -> Path:
        """The folder of fake programs."""
        return self.folder / "bin"

    def ran(self, uid: int) -> str:
        """Return the lines of what was run as one user."""
        lines = self.log.read_text().splitlines()
        return "\n".join(line for line in lines if f"uid={uid} " in line)

    def steering(self) -> dict[str, str]:
        """Return variables that would steer a naive hook's shell, Python, linker or settings."""
        return {
            "PYTHONPATH": str(self.folder / "python"),
            "PYTHONSTARTUP": str(self.folder / "python/sitecustomize.py"),
            "LD_PRELOAD": str(self.folder / "evil.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "BASH_ENV": str(self.folder / "rc"),
            "ENV": str(self.folder / "rc"),
            "GPULOCK_CONFIG": str(self.folder / "gpulock.conf"),
            "PATH": f"{self.programs}:/usr/bin:/bin",
        }

    def function(self, name: str) -> dict[str, str]:
        """Return a variable that bash takes for a function of that name."""
        told = f"echo uid=$UID euid=$EUID function >>{self.log}"
        return {f"BASH_FUNC_{name}%%": f"() {{ {told}; }}"}

    def build(self, programs: Iterable[str], settings: str) -> None:
        """Make it anew: `programs` are shadowed, `settings` are a gpulock.conf of its own."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.folder, self.programs, self.folder / "python"):
            folder.mkdir()
        self.log.touch()
        self.log.chmod(0o666)
        for name in programs:
            path = self.programs / name
            path.write_text(SHADOW.format(name=name, log=self.log))
            path.chmod(0o755)
        for name in ("sitecustomize", "usercustomize", "gpulock"):
            path = self.folder / "python" / f"{name}.py"
            path.write_text(PYTHON.format(log=str(self.log), name=name))
        (self.folder / "rc").write_text(f"echo uid=$(/usr/bin/id -u) euid=x rc >>{self.log}\n")
        (self.folder / "gpulock.conf").write_text(settings)
        source, library = self.folder / "evil.c", self.folder / "evil.so"
        source.write_text(PRELOAD)
        build = ["gcc", "-shared", "-fPIC", f'-DLOG="{self.log}"', "-o", str(library), str(source)]
        subprocess.run(build, check=True, timeout=60)
