# SPDX-License-Identifier: Apache-2.0
"""Parts of a GPU: gres/shard."""

from __future__ import annotations

from typing import Final

import pytest

from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK, SLEEP, held, started
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, by_slurm, wait_said

pytestmark = pytest.mark.lab
SHARDS: Final = {"shard": 8}  # two on each of four cards


def places(gpus: Gpulock, job: JobId) -> list[str]:
    """Return the locks of a job by their ids."""
    return sorted(name for name, r in gpus.locks(NODE).items() if r.job_id == str(job))


def test_shard_jobs_of_one_card_share_its_lock_until_the_last_has_gone(slurm_gpus: Gpulock) -> None:
    by_slurm(slurm_gpus, {"SLURM_SHARDS": "share"}, shares=SHARDS)
    slurm = slurm_gpus.slurm
    one = started(slurm_gpus, NODE, "--gres=shard:1")
    two = slurm.submit("slbob", "-w", NODE, "--gres=shard:1", script=SHOW_MASK + SLEEP)
    slurm.wait_running(two)
    assert "mask=0." in wait_said(slurm_gpus, two, "mask=")
    (first,), (second,) = places(slurm_gpus, one), places(slurm_gpus, two)
    assert first.removesuffix(".share1") == second.removesuffix(".share2")
    (card,) = [gpu for gpu in slurm_gpus.status(NODE)["gpus"] if gpu["holders"]]
    assert [holder["job_id"] for holder in card["holders"]] == [str(one), str(two)]
    assert card["state"] == "held"
    taken = slurm_gpus.command(NODE, "run", "--devices", "0", "--", "true")
    assert taken.returncode != 0 and f"job {one} and job {two}" in taken.stderr
    slurm.scancel(one)
    slurm.wait_settled(one)
    assert (places(slurm_gpus, one), places(slurm_gpus, two)) == ([], [second])
    slurm.scancel(two)
    slurm.wait_done(two)
    whole = started(slurm_gpus, NODE, "--gres=gpu:4")
    assert len(held(slurm_gpus, whole, NODE)) == 4
    assert not slurm.is_out(NODE)
