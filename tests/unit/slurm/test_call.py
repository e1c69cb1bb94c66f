# SPDX-License-Identifier: Apache-2.0
"""What slurmd's environment says, and what of it is not believed."""

from __future__ import annotations

import pytest

from gpulock.errors import UNKNOWN
from gpulock.slurm.call import SlurmHookCall
from tests.support.slurm_site import UID, Site, refusal

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
