# SPDX-License-Identifier: Apache-2.0
"""What a Slurm job's owner may write where root reads: any bytes, and no hook fails by them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.slurm.call import parse_stepd_title
from gpulock.slurm.request import MOST
from gpulock.slurm.scontrol import FIELDS, WIDTH, parse_squeue_row
from tests.support.mutations import try_a_million
from tests.support.slurm_site import RUN, Site, gres_count
from tests.support.slurm_site import row as squeue_row

# as os.environ has them: no zero byte, what is no UTF-8 is escaped
TEXTS = st.one_of(
    st.binary(max_size=300).map(lambda b: b.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    st.text("gres:/gpux=+,0123456789.-\n\t \u0660\udcff", max_size=60),
)
OWNERS = (
    *("SLURM_JOB_COMMENT", "SLURM_JOB_WORK_DIR", "SLURM_JOB_STDOUT", "SLURM_JOB_STDIN"),
    *("SPANK_SLURM_JOB_GPUS", "SPANK_LD_PRELOAD", "SLURM_JOB_STDERR", "SLURM_JOB_CONSTRAINTS"),
)
NUMBERS = itertools.count(100)


def count(text: str) -> None:
    """Expect a count that a node may have, or the refusal of a request."""
    try:
        assert 0 <= gres_count(text, ("gpu", "gpux")) <= MOST * len(text)
    except Refusal as refusal:
        assert refusal.kind == INVALID_REQUEST
        assert refusal.why.isprintable()


def title(data: bytes) -> None:
    """Expect the id of a job, or nothing."""
    job, step = parse_stepd_title(data)
    assert (job.isascii() and job.isdigit()) or (job, step) == ("", "")


def row(text: str) -> None:
    """Expect a text for each field."""
    assert set(parse_squeue_row(text)) == {key for _, key in FIELDS}


def test_a_row_of_squeues_has_no_field_of_the_users() -> None:
    assert not {"Name", "JobName", "Comment", "WorkDir", "Command"} & {name for name, _ in FIELDS}
    assert len(str(1 << 64)) < WIDTH


@given(TEXTS)
def test_any_text_is_a_count_or_an_invalid_request(text: str) -> None:
    count(text)


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=20).map(b"slurmstepd: [1".__add__)))
def test_any_title_is_a_step_or_none(data: bytes) -> None:
    title(data)


@given(TEXTS)
def test_any_line_is_a_row(text: str) -> None:
    row(text)


def each(data: bytes) -> None:
    """Parse the same bytes as everything that a job's owner may write."""
    text = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    count(text)
    title(data)
    title(b"slurmstepd: [" + data)
    row(text)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_a_million_texts_are_parsed() -> None:
    line = "".join(f"{word:{WIDTH}}" for word in ("12", "1000", "RUNNING", "0", "12", "N/A"))
    samples = (b"gres:gpu:a100:2,gres/gpux=1,gpu:3", b"slurmstepd: [12.batch]", line.encode())
    try_a_million(samples, each)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    made.set(REPORT_AT_END="yes")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("names", ["gpu", "gpux,gpu"])
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(OWNERS, TEXTS)))
def test_no_value_of_the_owners_fails_prolog_or_epilog(
    site: Site, names: str, values: dict[str, str]
) -> None:
    site.set(SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES=names)
    job = next(NUMBERS)
    site.answers(squeue_row(job, Gres="gres:gpux:1"))

    assert site.prolog(job, "0,1", **values) == RUN
    assert site.drained() == []

    site.epilog(job, "0,1", **values)
    assert site.locks() == []
    assert site.notes() == []
