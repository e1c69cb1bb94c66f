# SPDX-License-Identifier: Apache-2.0
"""What a hostile job brings along: programs and libraries that log as whom they were run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SHEPHERDS_LINE = 9999  # bytes
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
# every program that a hook of Grid Engine may want, looked up by a PATH of the job's
PROGRAMS = ("mkdir", "rmdir", "env", "python3", "sh", "dash", "qstat", "id", "cat", "rm", "mv")
SHADOW = """#!/bin/bash
echo "uid=$(/usr/bin/id -u) euid=$EUID fake {name}" >>{log}
exec /usr/bin/{name} "$@"
"""


@dataclass(frozen=True)
class Evil:
    """The kit of a hostile user, in a folder that everybody may read."""

    folder: Path

    @property
    def log(self) -> Path:
        """Who ran something of it: lines `uid=N euid=N what`."""
        return self.folder / "log"

    @property
    def programs(self) -> Path:
        """The folder of fake programs."""
        return self.folder / "bin"

    def as_root(self) -> list[str]:
        """Return the lines of what was run as root."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "uid=0 " in line]

    def plain(self) -> dict[str, str]:
        """Return variables that `qsub -v NAME=VALUE,...` takes."""
        return {
            "PYTHONPATH": str(self.folder / "python"),
            "PYTHONSTARTUP": str(self.folder / "python/sitecustomize.py"),
            "LD_PRELOAD": str(self.folder / "evil.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "BASH_ENV": str(self.folder / "rc"),
            "ENV": str(self.folder / "rc"),
            "GPULOCK_CONFIG": str(self.folder / "gpulock.conf"),
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "JOB_ID": "999999",
            "SGE_TASK_ID": "7",
            "QUEUE": "evil.q",
            "SGE_QMASTER_PORT": "1",
            "SGE_ROOT": str(self.folder),
            "SGE_CELL": "evil",
            "SGE_JOB_SPOOL_DIR": str(self.folder),
            # a newline in a name is not escaped, and the shepherd skips the `=` after it
            "NAME\n": "CUDA_VISIBLE_DEVICES=7",
            "SAME\nCUDA_VISIBLE_DEVICES": "7",
        }

    def odd(self) -> dict[str, str]:
        """Return variables for `qsub -V`: commas, newlines, 100 kB, bytes that are no UTF-8."""
        mask = "0,1,2,3,4,5,6,7"
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES", "SGE_GPU")
        twins = ("", "APPTAINERENV_", "SINGULARITYENV_")
        return {
            **{twin + name: mask for twin in twins for name in names},
            "AAA_LINES": f"a\nCUDA_VISIBLE_DEVICES={mask}\nadd_grp_id=1\n",
            "ZZZ_LINES": f"z\nCUDA_VISIBLE_DEVICES={mask}",
            "BACKSLASHES": f"\\nCUDA_VISIBLE_DEVICES={mask}\\",
            "LARGE": "x" * 100_000,
            # the shepherd reads a line of more than 9,999 bytes as several
            **{
                name: "x" * (SHEPHERDS_LINE - len(name) - 1) + f"CUDA_VISIBLE_DEVICES={mask}"
                for name in ("SPLIT", "APPTAINER_BINDPATH", "SINGULARITY_BINDPATH")
            },
            "BYTES": "\udcff\udcfe=\udc80",
            "BASH_FUNC_mkdir%%": f"() {{ echo uid=$UID euid=$EUID function >>{self.log}; }}",
        }


def kit(lab: Path) -> Evil:
    """Build the kit in a lab's scratch folder."""
    evil = Evil(lab / "evil")
    if evil.folder.exists():
        shutil.rmtree(evil.folder)
    for folder in (evil.folder, evil.programs, evil.folder / "python"):
        folder.mkdir()
    evil.log.touch()
    evil.log.chmod(0o666)
    for name in PROGRAMS:
        path = evil.programs / name
        path.write_text(SHADOW.format(name=name, log=evil.log))
        path.chmod(0o755)
    for name in ("sitecustomize", "usercustomize", "gpulock"):
        path = evil.folder / "python" / f"{name}.py"
        path.write_text(PYTHON.format(log=str(evil.log), name=name))
    (evil.folder / "rc").write_text(f"echo uid=$(/usr/bin/id -u) euid=x rc >>{evil.log}\n")
    (evil.folder / "gpulock.conf").write_text("HIDE_UNREQUESTED=no\nSGE_COMPLEXES=none\n")
    source = evil.folder / "evil.c"
    source.write_text(PRELOAD)
    build = ["gcc", "-shared", "-fPIC", f'-DLOG="{evil.log}"', "-o", str(evil.folder / "evil.so")]
    subprocess.run([*build, str(source)], check=True, timeout=60)
    return evil
