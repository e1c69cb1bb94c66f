# SPDX-License-Identifier: Apache-2.0
"""What a Slurm job's owner may write where root reads: any bytes, and no hook fails by them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.slurm.scontrol import FIELDS, WIDTH
from tests.support.slurm_site import RUN, Site
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


def test_a_row_of_squeues_has_no_field_of_the_users() -> None:
    assert not {"Name", "JobName", "Comment", "WorkDir", "Command"} & {name for name, _ in FIELDS}
    assert len(str(1 << 64)) < WIDTH


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(OWNERS, TEXTS)))
def test_no_value_of_the_owners_fails_prolog_or_epilog(site: Site, values: dict[str, str]) -> None:
    site.set(SLURM_DEVICE_SELECTION="gpulock")
    job = next(NUMBERS)
    site.answers(squeue_row(job))

    assert site.prolog(job, "0,1", **values) == RUN
    assert site.drained() == []

    site.epilog(job, "0,1", **values)
    assert site.locks() == []
    assert site.notes() == []
