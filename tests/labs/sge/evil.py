# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of Grid Engine brings along: the kit, and variables of a job's."""

from __future__ import annotations

from pathlib import Path

from tests.labs.common.hostile_kit import Kit

SHEPHERDS_LINE = 9999  # bytes
# every program that a hook of Grid Engine may want, looked up by a PATH of the job's
PROGRAMS = ("mkdir", "rmdir", "env", "python3", "sh", "dash", "qstat", "id", "cat", "rm", "mv")


class Evil(Kit):
    """The kit of a hostile user of Grid Engine."""

    def plain(self) -> dict[str, str]:
        """Return variables that `qsub -v NAME=VALUE,...` takes."""
        return {
            **self.steering(),
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
            **self.function("mkdir"),
        }


def kit(lab: Path) -> Evil:
    """Build the kit in a lab's scratch folder."""
    evil = Evil(lab / "evil")
    evil.build(PROGRAMS, "HIDE_UNREQUESTED=no\nSGE_COMPLEXES=none\n")
    return evil
