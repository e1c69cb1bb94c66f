# SPDX-License-Identifier: Apache-2.0
"""What slurmd's environment says, and what of it is not believed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.errors import UNKNOWN
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.scontrol import FIELDS, WIDTH
from tests.support.faults import refusal
from tests.support.slurm_site import RUN, UID, Site, row

NUMBERS = ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_RESTART_COUNT", "SLURM_JOB_NUM_NODES")
NAMES = ("SLURMD_NODENAME", "SLURM_CLUSTER_NAME")


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "text", ["", "x", "-1", "+1", "1.5", "0x10", " 1", "1 ", "1\n2", "²", "१", "9" * 19, "9" * 9999]
)
def test_a_number_that_is_none_is_refused_in_one_short_line(
    site: Site, key: str, text: str
) -> None:
    found = refusal(lambda: site.call(**{key: text}))
    assert (found.kind, key in found.why, len(found.why) < 120) == (UNKNOWN, True, True)


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize(
    "text", ["", "..", "../n1", "n1/x", "/n1", ".n1", "n 1", "n\n1", "n\0", "nöd", "-", "n" * 200]
)
def test_a_name_that_is_no_plain_name_is_refused(site: Site, key: str, text: str) -> None:
    found = refusal(lambda: site.call(**{key: text}))
    assert (found.kind, key in found.why) == (UNKNOWN, True)


def test_what_may_be_missing_has_a_meaning(site: Site) -> None:
    environ = site.environ(gpus=None)
    for key in ("SLURM_JOB_USER", "SLURM_JOB_PARTITION", "SLURM_JOB_RESTART_COUNT"):
        del environ[key]
    for key in ("SLURM_JOB_NUM_NODES", "SLURM_CONF", "SLURM_JOB_STDIN"):
        del environ[key]
    call = SlurmHookCall(environ)
    assert (call.user, call.partition, call.restart, call.nodes) == (str(UID), "", 0, 1)
    assert (call.gpus, call.positions(), call.conf, call.batch) == (None, [], "", False)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("2,0", ["2", "0"]),
        ("0,2-3,7", ["0", "2", "3", "7"]),
        ("3-3", ["3"]),
        ("00,01", ["0", "1"]),
        ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]),
        ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"]),
    ],
)
def test_a_list_of_gpus_is_read_with_its_ranges(site: Site, text: str, entries: list[str]) -> None:
    assert site.call(gpus=text).positions() == entries


@pytest.mark.parametrize(
    "text",
    [
        "0,,1",
        "-1",
        "1-",
        "0-1-2",
        "0-900,0-900",
        " 0",
        "0\n1",
        "0-1000",
        "9" * 19,
        f"0-{'9' * 18}",
        "GPU-a\nb",
        "(null)",
        "",
        "0,3-1",
        *("0,0", "0-2,1", "0,00", "GPU-a,GPU-a"),  # one is named twice
    ],
)
def test_a_list_that_is_not_unmistakable_is_refused(site: Site, text: str) -> None:
    found = refusal(site.call(gpus=text).positions)
    assert (found.kind, len(found.why) < 120) == (UNKNOWN, True)


# --- what the owner may write where root reads: no hook fails by any bytes ------------------------

# as os.environ has them: no zero byte, what is no UTF-8 is escaped
TEXTS = st.one_of(
    st.binary(max_size=300).map(lambda b: b.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    st.text("gres:/gpux=+,0123456789.-\n\t \u0660\udcff", max_size=60),
)
OWNERS = (
    *("SLURM_JOB_COMMENT", "SLURM_JOB_WORK_DIR", "SLURM_JOB_STDOUT", "SLURM_JOB_STDIN"),
    *("SPANK_SLURM_JOB_GPUS", "SPANK_LD_PRELOAD", "SLURM_JOB_STDERR", "SLURM_JOB_CONSTRAINTS"),
)
JOBS = itertools.count(100)


def test_a_row_of_squeues_has_no_field_of_the_users() -> None:
    assert not {"Name", "JobName", "Comment", "WorkDir", "Command"} & {name for name, _ in FIELDS}
    assert len(str(1 << 64)) < WIDTH


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(OWNERS, TEXTS)))
def test_no_value_of_the_owners_fails_prolog_or_epilog(
    one_site: Site, values: dict[str, str]
) -> None:
    site = one_site
    site.set(SLURM_DEVICE_SELECTION="gpulock")
    job = next(JOBS)
    site.answers(row(job))

    assert site.prolog(job, "0,1", **values) == RUN
    assert site.drained() == []

    site.epilog(job, "0,1", **values)
    assert site.locks() == []
    assert site.notes() == []
