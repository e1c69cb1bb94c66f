# SPDX-License-Identifier: Apache-2.0
"""To which user a uid belongs by subuid(5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.node.subordinate import SubordinateUids

PASSWD = "root:x:0:0::/:\nann:x:1000:1000::/:\nbob:x:1001:1001::/:\nodd:x:100005:1::/:\nshort:x\n"
SUBUID = "ann:100000:65536\n1001:300000:10\nldap:400000:10\nbad:x:10\n\nann:1:2:3\n"


@pytest.mark.parametrize(
    ("uid", "owner"),
    [
        *[(1000, 1000), (99_999, 99_999), (100_000, 1000), (165_535, 1000), (165_536, 165_536)],
        *[(300_009, 1001), (300_010, 300_010)],  # by number
        (400_009, 400_000),  # of a user whom this node's passwd does not name
        (100_005, 100_005),  # an account of its own in somebody's range
        (10, 10),
    ],
)
def test_a_subordinate_uid_belongs_to_the_user_in_whose_range_it_is(
    tmp_path: Path, uid: int, owner: int
) -> None:
    (tmp_path / "subuid").write_text(SUBUID)
    (tmp_path / "passwd").write_text(PASSWD)
    uids = SubordinateUids(str(tmp_path / "subuid"), str(tmp_path / "passwd"))
    assert uids.owner(uid) == owner


def test_without_such_files_each_uid_is_its_own(tmp_path: Path) -> None:
    assert SubordinateUids(str(tmp_path / "subuid"), str(tmp_path / "passwd")).owner(7) == 7
