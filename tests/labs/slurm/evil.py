# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of Slurm brings along: the kit, and variables of a job's."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from tests.labs.common.hostile_kit import Kit
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.support.wait import LabError

# every program that a hook of Slurm may want, looked up by a PATH of the job's
_PROGRAMS: Final = ("env", "python3", "sh", "dash", "squeue", "scontrol", "scancel", "id", "sleep")
_MASK: Final = "0,1,2,3"


class Evil(Kit):
    """The kit of a hostile user of Slurm."""

    def variables(self) -> dict[str, str]:
        """Return variables that would steer a naive hook, or forge its answers."""
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
        twins = ("", "APPTAINERENV_", "SINGULARITYENV_")
        return {
            **self.steering(),
            **{twin + name: _MASK for twin in twins for name in names},
            **FORGED,
            "SLURM_JOB_ID": "999999",
            "SLURM_JOBID": "999999",
            "AAA_LINES": f"a\nexport CUDA_VISIBLE_DEVICES={_MASK}\n",
            "ZZZ_LINES": f"z\nCUDA_VISIBLE_DEVICES={_MASK}",
            "APPTAINER_BINDPATH": f"/a\nexport CUDA_VISIBLE_DEVICES={_MASK}",
            "LARGE": "x" * 100_000,
            "BYTES": "\udcff\udcfe=\udc80",
            **self.function("sleep"),
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


# A plugin of the user's own sbatch: each entry of the job's environment it sets is a Prolog's too.
_SPANK: Final = """
#include <stdlib.h>
#include <string.h>
const char plugin_name[] = "evil", plugin_type[] = "spank";
const unsigned int plugin_version = RELEASE, spank_plugin_version = 1;
int spank_job_control_setenv(void *, const char *, const char *, int);
int slurm_spank_init_post_opt(void *spank, int count, char **words)
{
    int size = atoi(getenv("EVIL_SIZE")), number = atoi(getenv("EVIL_COUNT"));
    char name[] = "EVILAA", *value = malloc(size + 1);
    memset(value, 'x', size);
    value[size] = 0;
    for (; number; number--) {
        name[4] = 'A' + number / 26;
        name[5] = 'A' + number % 26;
        spank_job_control_setenv(words, name, value, 1);
    }
    spank_job_control_setenv(words, "LD_PRELOAD", getenv("EVIL_LIBRARY"), 1);
    spank_job_control_setenv(words, "SLURM_JOB_GPUS", "0,1,2,3", 1);
    spank_job_control_setenv(words, "X\\nLD_PRELOAD", getenv("EVIL_LIBRARY"), 1);
    spank_job_control_setenv(words, "BYTES\\xff", "\\xff\\nSLURM_JOB_UID=0", 1);
    return 0;
}
"""


def spank_plugin(gpus: Gpulock, user: str, evil: Evil, count: int, size: int) -> dict[str, str]:
    """Return the environment in which sbatch gives a job variables of SPANK's job control."""
    home = gpus.slurm.users[user].home
    (home / "spank.c").write_text(_SPANK.replace("(words, ", "(spank, "))
    release = "-DRELEASE=0x{:02x}{:02x}00".format(*gpus.slurm.release)
    build = ["gcc", "-shared", "-fPIC", release, "-o", f"{home}/spank.so", f"{home}/spank.c"]
    subprocess.run(build, check=True, timeout=60)
    (home / "plugstack.conf").write_text(f"required {home}/spank.so\n")
    own = (gpus.slurm.lab / "etc/slurm.conf").read_text()
    (home / "slurm.conf").write_text(f"{own}PlugStackConfig={home}/plugstack.conf\n")
    return {
        "SLURM_CONF": str(home / "slurm.conf"),
        "EVIL_COUNT": str(count),
        "EVIL_SIZE": str(size),
        "EVIL_LIBRARY": str(evil.folder / "evil.so"),
    }


def kit(gpus: Gpulock) -> Evil:
    """Build the kit in the lab's scratch folder."""
    evil = Evil(gpus.slurm.lab / "evil")
    evil.build(_PROGRAMS, "HIDE_UNREQUESTED=no\n")
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
