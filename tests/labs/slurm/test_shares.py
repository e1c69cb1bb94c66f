# SPDX-License-Identifier: Apache-2.0
"""Typed GRES that gpulock selects: places on a card (`gpux:share:1`), models, MIG instances.

Slurm 22.05 counts none of `Name=gpu ... Flags=CountOnly`, so what is only counted has a name of its
own: beside gres/gpu, or alone. The lines are those of docs/slurm.md.
"""

from __future__ import annotations

import re

import pytest

from tests.labs.common.installed import driver_settings
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK, SLEEP, started
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, by_gpulock, settings, wait_said

pytestmark = pytest.mark.lab
PLACES = 4
ONE = f"3:{PLACES}"  # SHARES: the card that has places
SHOW = f"echo share=${{GPULOCK_SHARE-none}}.\n{SHOW_MASK}"


def sharing(gpus: Gpulock, shares: str, gres: str = "count", **counts: int) -> None:
    """Let NODE have cards of places, and Slurm count what `counts` says of each type."""
    by_gpulock(gpus, gres=gres, counts=counts)
    configure(gpus, SHARES=shares)


def configure(gpus: Gpulock, **keys: str) -> None:
    """Write NODE's settings: gpulock selects what slurmctld counts."""
    known = {"SLURM_DEVICE_SELECTION": "gpulock", "SLURM_GRES": "gpu gpux", "SLURM_WAIT": "0.2"}
    gpus.configure(NODE, **settings(gpus, **{**known, **keys}))


def places(gpus: Gpulock, job: JobId) -> list[str]:
    """Return the locks of a job by their ids."""
    return sorted(name for name, r in gpus.locks(NODE).items() if r.job_id == str(job))


def share_job(gpus: Gpulock, user: str = "slalice", count: int = 1) -> JobId:
    words = ("-w", NODE, f"--gres=gpux:share:{count}")
    return gpus.slurm.submit(user, *words, script=SHOW + SLEEP)


def test_slurmd_lists_the_places_that_it_counts(slurm_gpus: Gpulock) -> None:
    sharing(slurm_gpus, ONE, "gpulock", share=2 * PLACES)
    job = share_job(slurm_gpus, count=2)
    assert f"share=2/{PLACES}." in wait_said(slurm_gpus, job, "mask=")
    assert len(places(slurm_gpus, job)) == 2
    slurm = slurm_gpus.slurm
    listed = slurm.run_in(NODE, ["slurmd", "-G", "-N", NODE]).stderr
    assert re.search(rf"Gres Name=gpux Type=share .*Count={2 * PLACES}\b", listed)


def test_models_and_instances_are_granted_by_type(slurm_gpus: Gpulock) -> None:
    counts = {"a100": 6, "3g.40gb": 3}
    by_gpulock(slurm_gpus, gres="count", counts=counts)
    found = slurm_gpus.write_machine(NODE, "a100-mig")
    configure(slurm_gpus, **driver_settings(found.directory))
    cards = started(slurm_gpus, NODE, "--gres=gpux:a100:2")
    part = started(slurm_gpus, NODE, "--gres=gpux:3g.40gb:1")
    both = started(slurm_gpus, NODE, "--gres=gpux:a100:1,gpux:3g.40gb:1")
    assert len(whole := places(slurm_gpus, cards)) == 2
    assert not [name for name in whole if ".gi" in name]
    (instance,) = places(slurm_gpus, part)
    profiles = {
        f"{gpu.bus}.{one.name}": one.profile for gpu in found.machine.gpus for one in gpu.mig
    }
    assert profiles[instance] == "3g.40gb"
    kinds = [profiles.get(name, "card") for name in places(slurm_gpus, both)]
    assert sorted(kinds) == ["3g.40gb", "card"]
