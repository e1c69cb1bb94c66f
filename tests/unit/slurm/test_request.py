# SPDX-License-Identifier: Apache-2.0
"""Which devices a Slurm job gets, or how many: from Slurm's positions or slurmctld."""

from __future__ import annotations

import pytest

from gpulock.errors import INVALID_REQUEST, UNKNOWN
from gpulock.node.settings import Settings
from gpulock.slurm import request
from gpulock.slurm.call import SlurmHookCall
from tests.support.slurm_site import INVALID, SILENT, Site, gres_count, refusal, row


def settings(site: Site, **keys: str) -> Settings:
    return Settings({**site.settings, **keys})


def job_count(call: SlurmHookCall, keys: Settings) -> int:
    return sum(number for _, number in request.list_slurm_job_gres(call, keys))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:0", 0),
        ("gpu:v100", 1),
        ("gpu:v100:2", 2),
        ("gpu:nvidia_a100-sxm4.80gb:4", 4),
        ("gpu:1g.5gb", 1),
        ("gpu:1g.5gb:2", 2),
        ("gpu:1g.10gb+me", 1),
        ("gpu:1g.10gb+me:1", 1),
        ("gres:gpu:3g.20gb:1,gres:gpu:1g.5gb:2", 3),
        ("gres:gpu", 1),
        ("gres:gpu:2", 2),
        ("gres/gpu:2", 2),
        ("gres/gpu=2", 2),
        ("gres:gpu=v100:2", 2),
        ("gres:gpu:v100:2,gres:gpu:a100:1", 3),
        ("gres:gpux:1,gres:gpu:2", 3),
        ("gres:nvme:1", 0),
        ("gres:nvme:1,gres:gpu:2", 2),
        ("gres:gpu:2, gres:nvme:1", 2),
        ("gpuy:4,mygpu:4,gres:nogpu:4", 0),
        ("gpu:999", 999),
        *(("gpu: 1", 1), ("gpu:+1", 1), ("gpu:a: 1", 1)),  # as Slurm reads them
    ],
)
def test_a_request_by_name_type_and_number_is_counted(text: str, count: int) -> None:
    assert gres_count(text, ("gpu", "gpux")) == count


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "gpu:1,",
        ",gpu:1",
        ":2",
        "gres:",
        "gres/",
        "gres:gpu:1,gres:",
        "gpu:a:b:2",
        "gpu:+me:1",
        "gpu:1+1:1",
        "gpu:1000",
        *(f"gpu:{'9' * 18}", f"gpu:{'9' * 19}", "gpu:-1", "gpu:", "gpu:2:2"),
        *("gpu:v100:two", "gpu:v100:", "gpu:v100:-2"),
    ],
)
def test_a_request_that_cannot_be_read_is_unknown(text: str) -> None:
    found = refusal(lambda: gres_count(text, ("gpu",)))
    assert (found.kind, len(found.why) < 140) == (INVALID_REQUEST, True)


@pytest.mark.parametrize(("gres", "count"), [("gres:gpu:3", 3), ("gpu", 1), ("N/A", 0), ("", 0)])
def test_slurmctlds_word_is_the_count_and_no_comment(site: Site, gres: str, count: int) -> None:
    site.answers(row(12, Gres=gres))
    keys = settings(site, SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES="gpu gpux")
    assert job_count(site.call(gpus=None, SLURM_JOB_COMMENT="gres:gpu:4"), keys) == count
    assert len(site.calls()) == 1


@pytest.mark.parametrize("words", [INVALID, SILENT])
def test_a_job_that_slurmctld_does_not_know_or_tell_is_unknown(site: Site, words: str) -> None:
    site.fails(words)
    keys = settings(site, SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES="gpu gpux")
    assert refusal(lambda: request.list_slurm_job_gres(site.call(gpus=None), keys)).kind == UNKNOWN


@pytest.mark.parametrize(
    "text", ["gpu:3,gpu:1", "gres:gpu:1,gres/gpu:2", "gpu:a:1,gpu:2", "gpu,gpu"]
)
def test_what_is_named_twice_is_refused_because_slurm_charges_the_last_alone(text: str) -> None:
    found = refusal(lambda: gres_count(text, ("gpu",)))
    assert (found.kind, "twice" in found.why) == (INVALID_REQUEST, True)


@pytest.mark.parametrize("field", ["tres-per-job", "tres-per-task", "tres-per-socket"])
def test_what_is_not_asked_for_by_node_is_refused_and_not_taken_for_nothing(
    site: Site, field: str
) -> None:
    keys = settings(site, SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES="gpu gpux")
    keys.slurm_gres = ("fpga", "gpu")
    site.answers(row(12, **{field: "gres:gpu:2"}))
    found = refusal(lambda: request.list_slurm_job_gres(site.call(gpus=None), keys))
    assert (found.kind, "not per node" in found.why) == (INVALID_REQUEST, True)


@pytest.mark.parametrize("field", ["Gres", "tres-per-task"])
@pytest.mark.parametrize("pad", ["0", " "])
def test_a_request_longer_than_squeues_column_is_refused_because_its_end_is_not_seen(
    site: Site, field: str, pad: str
) -> None:
    keys = settings(site, SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES="gpu gpux")
    whole = f"gres:nvme:{pad * 400}1,gres:gpu:1"
    whole = f"gres:gpu:4,{whole}" if field == "Gres" else whole
    site.answers(row(12, **{field: whole[:400]}))
    found = refusal(lambda: request.list_slurm_job_gres(site.call(gpus=None), keys))
    assert (found.kind, "too long" in found.why) == (INVALID_REQUEST, True)
