# SPDX-License-Identifier: Apache-2.0
"""Typed GRES that gpulock selects: places on a card (`gpux:share:1`), models, MIG instances.

Slurm 22.05 counts none of `Name=gpu ... Flags=CountOnly`, so what is only counted has a name of its
own: beside gres/gpu, or alone. The lines are those of docs/slurm.md.
"""

from __future__ import annotations

import re

import pytest

from gpulock.node.devices import SHARE
from tests.labs.common.installed import driver_settings, reap
from tests.labs.common.processes import end
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK, SLEEP, kill_steps, started, wait_requeued
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, by_gpulock, settings, wait_said

pytestmark = pytest.mark.lab
CARDS = 4
PLACES = 4
ONE, TWO = f"3:{PLACES}", f"2:{PLACES} 3:{PLACES}"  # SHARES: the cards that have places
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


def card(name: str) -> str:
    return name.partition(SHARE)[0]


def share_job(gpus: Gpulock, user: str = "slalice", count: int = 1) -> JobId:
    words = ("-w", NODE, f"--gres=gpux:share:{count}")
    return gpus.slurm.submit(user, *words, script=SHOW + SLEEP)


def test_three_shares_are_on_one_card_and_the_end_of_one_disturbs_no_neighbour(
    slurm_gpus: Gpulock,
) -> None:
    sharing(slurm_gpus, TWO, "gpulock", share=2 * PLACES)  # whole cards are gres/gpu
    slurm = slurm_gpus.slurm
    jobs = [share_job(slurm_gpus) for _ in range(3)]
    told = {" ".join(wait_said(slurm_gpus, job, "mask=").split()) for job in jobs}
    assert told <= {f"share=1/{PLACES}. mask={number}." for number in (2, 3)} and len(told) == 1
    (one,), (two,), (three,) = (places(slurm_gpus, job) for job in jobs)
    assert card(one) == card(two) == card(three)
    slurm.scancel(jobs[0])
    slurm.wait_done(jobs[0])
    end(kill_steps(slurm_gpus, jobs[1], NODE))
    slurm.scancel(jobs[1])
    slurm.wait_done(jobs[1])
    reap(slurm_gpus, NODE)
    assert list(slurm_gpus.locks(NODE)) == [three]
    other = started(slurm_gpus, NODE, "--gres=gpu:3")
    assert len(places(slurm_gpus, other)) == 3
    assert card(three) not in places(slurm_gpus, other)
    both = slurm.submit("slalice", "-w", NODE, "--gres=gpu:1,gpux:share:1", script="echo ran\n")
    assert slurm.wait_settled(both) == "FAILED"
    assert "a share and other GPUs are asked for in one job" in slurm.said(both)
    assert not slurm.is_out(NODE)


def test_a_whole_card_job_waits_for_the_last_share(slurm_gpus: Gpulock) -> None:
    sharing(slurm_gpus, ONE, v100=CARDS, share=PLACES)
    slurm = slurm_gpus.slurm
    part = share_job(slurm_gpus)
    wait_said(slurm_gpus, part, "mask=")
    whole = slurm.submit("slbob", "-w", NODE, f"--gres=gpux:v100:{CARDS}", script="echo ran\n")
    wait_requeued(slurm_gpus, whole)
    assert f"asked for, 3 of {CARDS} free" in slurm.said(whole)
    assert f"3: job {part}" in slurm.said(whole)
    assert "ran" not in slurm.said(whole).splitlines()
    assert len(places(slurm_gpus, part)) == 1
    slurm.scancel(part)
    slurm.wait_done(part)
    slurm.begin(whole)
    assert slurm.wait_settled(whole) == "COMPLETED"
    assert not slurm.is_out(NODE)


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
