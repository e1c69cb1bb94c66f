# SPDX-License-Identifier: Apache-2.0
"""The simulated execd writes nothing that a real one does not (data/sge-8.1.9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import execd

REAL = Path(__file__).parents[2] / "support/data/sge-8.1.9"


def pairs_of(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize("kind", ["config", "environment"])
@pytest.mark.parametrize("sample", ["parallel", "array"])
def test_every_key_we_write_is_one_that_execd_writes(
    tmp_path: Path, sample: str, kind: str
) -> None:
    own = {"pe": "smp"} if sample == "parallel" else {"task_id": 3}
    job = execd.SimulatedJob(job_id=4, command=("/bin/sleep", "4"), **own)
    ours = pairs_of((execd.spool_job(tmp_path, job).folder / kind).read_text())
    real = pairs_of((REAL / f"{sample}.{kind}").read_text())
    assert ours.keys() <= real.keys()
    for key in ("script_file", "pe", "ja_task_id", "njob_args", "SGE_TASK_ID", "NHOSTS"):
        assert ours.get(key) == real.get(key)
