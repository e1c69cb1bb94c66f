# SPDX-License-Identifier: Apache-2.0
"""SLURM_SHARDS=share: shard jobs of one card hold a place on it each, and nobody else gets in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpulock.errors import INVALID_REQUEST
from tests.support.clock import VirtualClock
from tests.support.slurm_site import OTHER_UID, ROOT, RUN, SILENT, Site, freezer, row
from tests.support.trees import bus

SHARD, WHOLE = "gres:shard:1", "gres:gpu:1"
FIRST, SECOND = f"{bus(0)}.share1", f"{bus(0)}.share2"


@pytest.fixture
def site(tmp_path: Path, clock: VirtualClock) -> Site:
    """A node whose slurmd gives out shards: jobs 12 to 15 ask for some, job 20 for a card."""
    made = Site(tmp_path, SLURM_SHARDS="share")
    made.map("0", "1", "2", "3", shared="shard")
    made.process(60, "slurmd", uid=ROOT)
    shards = [row(job, Gres=SHARD) for job in (12, 13, 14, 15)]
    made.answers(*shards, row(20, Gres=WHOLE))
    clock.run()  # squeue is a real program
    made.set(SLURM_WAIT="0.2")
    return made


def both(site: Site) -> None:
    """Let jobs 12 and 13 share the first card."""
    assert site.prolog(12, "0") == site.prolog(13, "0", SLURM_JOB_UID=str(OTHER_UID)) == RUN
    assert (site.granted(12), site.granted(13)) == ([FIRST], [SECOND])


def end_other(site: Site) -> None:
    site.epilog(13, "0", SLURM_JOB_UID=str(OTHER_UID))


# --- who gets in ----------------------------------------------------------------------------------


def test_the_card_is_free_for_a_whole_job_when_the_last_has_gone(site: Site) -> None:
    both(site)
    assert site.prolog(20, "0") == RUN
    assert "GPU 0, not free: 0: job 12 and job 13" in site.refused(20)
    site.epilog(12, "0")
    assert site.locks() == [SECOND]
    assert site.prolog(20, "0") == RUN
    assert "not free: 0: job 13" in site.refused(20)
    end_other(site)
    assert site.locks() == []
    assert site.prolog(20, "0") == RUN
    assert site.granted(20) == [bus(0)]


def test_a_shard_job_never_joins_a_card_that_is_held_whole(site: Site) -> None:
    assert site.prolog(20, "0") == RUN
    assert site.prolog(12, "0") == RUN
    assert "not free: 0: job 20" in site.refused(12)
    assert site.locks() == [bus(0)]


@pytest.mark.parametrize(
    "told",
    [
        {"tres-per-job": "gres:shard:1,gres:nvme:1," * 20},
        {"Gres": "gres:shard:1," * 40},
        {"Gres": "gres:shard:1,gres:nvme:" + " " * 400 + "1"},
    ],
)
def test_what_may_be_cut_off_counts_as_a_whole_card(site: Site, told: dict[str, str]) -> None:
    site.answers(row(12, **{field: text[:400] for field, text in told.items()}))
    assert site.prolog(12, "0") == RUN
    assert site.granted(12) == [bus(0)]


def test_where_slurmctld_is_silent_a_job_has_its_card_alone(site: Site) -> None:
    site.fails(SILENT)
    assert site.prolog(12, "0") == RUN
    assert site.granted(12) == [bus(0)]


@pytest.mark.parametrize(
    ("told", "keys", "gpus"),
    [
        ({"Gres": "gres:mps:50"}, {}, "0"),
        ({"Gres": "gres:shard:1,gres:gpu:1"}, {}, "0"),
        ({"Gres": SHARD, "tres-per-job": "gres:gpu:1"}, {}, "0"),
        ({"Gres": SHARD}, {"SLURM_DEVICE_SELECTION": "gpulock"}, "0"),
        ({"Gres": SHARD}, {"SLURM_SHARDS": "refuse"}, "0"),
        ({"Gres": SHARD}, {}, None),
    ],
)
def test_every_other_part_of_a_gpu_is_refused(
    site: Site, told: dict[str, str], keys: dict[str, str], gpus: str | None
) -> None:
    site.map("0", "1", "2", "3", shared="mps shard")
    site.set(**keys)
    site.answers(row(12, **told))
    assert site.prolog(12, gpus) == RUN
    assert "which this node does not give" in site.refused(12, INVALID_REQUEST, code=1)
    assert site.locks() == []


def test_a_shard_job_waits_for_no_mps(site: Site) -> None:
    site.set(SHARES="0:4", SHARE_MPS="yes")
    assert site.prolog(12, "0") == RUN
    assert site.granted(12) == [FIRST]


def test_the_same_job_again_frees_its_own_place_alone(site: Site) -> None:
    both(site)
    assert site.prolog(12, "0", SLURM_JOB_RESTART_COUNT="1") == RUN
    assert site.granted(12) == [FIRST]
    assert site.locks() == [FIRST, SECOND]


# --- who holds what -------------------------------------------------------------------------------


def test_a_claim_that_needs_the_card_reaps_a_place_that_drains_no_sooner_than_it_may(
    site: Site,
) -> None:
    both(site)
    site.process(702, "python", fds={9: site.dev / "nvidia0"})
    site.epilog(12, "0")
    end_other(site)
    assert site.locks() == [FIRST]  # of the user whose process has the card open
    assert site.prolog(20, "0") == RUN
    site.refused(20)
    shutil.rmtree(site.proc.root / "702")
    assert site.prolog(20, "0") == RUN
    assert site.granted(20) == [bus(0)]


def test_the_cgroup_of_one_job_keeps_its_own_place_alone(site: Site) -> None:
    both(site)
    site.cgroup(f"{freezer(13, OTHER_UID)}/step_0", 900)
    site.epilog(12, "0")
    end_other(site)
    assert site.locks() == [SECOND]
