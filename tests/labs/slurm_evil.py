# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of Slurm brings along: programs and libraries that log as whom they run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.labs.sge_evil import PRELOAD, PYTHON, SHADOW
from tests.labs.sge_wait import LabError
from tests.labs.slurm_gpulock import Gpulock
from tests.labs.slurm_lab import JobId

# every program that a hook of Slurm may want, looked up by a PATH of the job's
_PROGRAMS: Final = ("env", "python3", "sh", "dash", "squeue", "scontrol", "scancel", "id", "sleep")
_MASK: Final = "0,1,2,3"


@dataclass(frozen=True)
class Evil:
    """The kit of a hostile user, in a folder that everybody may read."""

    folder: Path

    @property
    def log(self) -> Path:
        """Who ran something of it: lines `uid=N euid=N what`."""
        return self.folder / "log"

    def ran(self, uid: int) -> str:
        """Return the lines of what was run as one user."""
        lines = self.log.read_text().splitlines()
        return "\n".join(line for line in lines if f"uid={uid} " in line)

    def variables(self) -> dict[str, str]:
        """Return variables that would steer a naive hook, or forge its answers."""
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
        twins = ("", "APPTAINERENV_", "SINGULARITYENV_")
        return {
            "PYTHONPATH": str(self.folder / "python"),
            "PYTHONSTARTUP": str(self.folder / "python/sitecustomize.py"),
            "LD_PRELOAD": str(self.folder / "evil.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "BASH_ENV": str(self.folder / "rc"),
            "ENV": str(self.folder / "rc"),
            "GPULOCK_CONFIG": str(self.folder / "gpulock.conf"),
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            **{twin + name: _MASK for twin in twins for name in names},
            **FORGED,
            "SLURM_JOB_ID": "999999",
            "SLURM_JOBID": "999999",
            "AAA_LINES": f"a\nexport CUDA_VISIBLE_DEVICES={_MASK}\n",
            "ZZZ_LINES": f"z\nCUDA_VISIBLE_DEVICES={_MASK}",
            "APPTAINER_BINDPATH": f"/a\nexport CUDA_VISIBLE_DEVICES={_MASK}",
            "LARGE": "x" * 100_000,
            "BYTES": "\udcff\udcfe=\udc80",
            "BASH_FUNC_sleep%%": f"() {{ echo uid=$UID euid=$EUID function >>{self.log}; }}",
        }


# What Slurm's own hooks are told; of these a job's owner can set each, for himself.
FORGED: Final[Mapping[str, str]] = {
    "SLURM_JOB_GPUS": _MASK,
    "SLURM_STEP_GPUS": _MASK,
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_UID": "0",
    "SLURM_JOB_RESTART_COUNT": "99",
    "SLURM_JOB_COMMENT": "gres:gpu:4",
    "SLURM_HET_JOB_ID": "999999",
    "SLURM_JOB_ID_HET_GROUP_0": "999999",
    "SLURMD_NODENAME": "slnode3",
    "SLURM_LOCALID": "7",
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_SCRIPT_CONTEXT": "epilog_slurmd",
}


def kit(gpus: Gpulock) -> Evil:
    """Build the kit in the lab's scratch folder."""
    evil = Evil(gpus.slurm.lab / "evil")
    shutil.rmtree(evil.folder, ignore_errors=True)
    for folder in (evil.folder, evil.folder / "bin", evil.folder / "python"):
        folder.mkdir()
    evil.log.touch()
    evil.log.chmod(0o666)
    for name in _PROGRAMS:
        path = evil.folder / "bin" / name
        path.write_text(SHADOW.format(name=name, log=evil.log))
        path.chmod(0o755)
    for name in ("sitecustomize", "usercustomize", "gpulock"):
        path = evil.folder / "python" / f"{name}.py"
        path.write_text(PYTHON.format(log=str(evil.log), name=name))
    (evil.folder / "rc").write_text(f"echo uid=$(/usr/bin/id -u) euid=x rc >>{evil.log}\n")
    (evil.folder / "gpulock.conf").write_text("HIDE_UNREQUESTED=no\n")
    source = evil.folder / "evil.c"
    source.write_text(PRELOAD)
    build = ["gcc", "-shared", "-fPIC", f'-DLOG="{evil.log}"', "-o", str(evil.folder / "evil.so")]
    subprocess.run([*build, str(source)], check=True, timeout=60)
    return evil


def submit(
    gpus: Gpulock, user: str, words: Sequence[str], env: Mapping[str, str], script: str
) -> JobId:
    """Submit a script with an environment that is set as the user: root loads nothing of it."""
    pairs = [f"{name}={value}" for name, value in env.items()]
    line = ["/usr/bin/env", *pairs, "/usr/bin/sbatch", "--parsable", "--output=out.%j", *words]
    done = gpus.slurm.run_as(user, line, stdin=script)
    if not done.stdout.strip().isdigit():
        raise LabError(f"{words}: {done.stdout}{done.stderr}")
    return JobId(int(done.stdout))
