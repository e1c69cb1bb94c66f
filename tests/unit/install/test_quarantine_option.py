# SPDX-License-Identifier: Apache-2.0
"""`gpulock install` says what takes a GPU out of service, and sets it where asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.node_part import NodePart


def node_part(tmp_path: Path, text: str = "") -> NodePart:
    """Return the part of a node with this settings file."""
    config = tmp_path / "gpulock.conf"
    config.write_text(f"STATE_DIR={tmp_path}\n{text}")
    return NodePart(config, "sge")


def test_the_default_is_told_and_not_written(tmp_path: Path) -> None:
    made = node_part(tmp_path)
    assert made.quarantine_keys(None) == {}
    (note,) = made.notes
    assert "xid missing (QUARANTINE_ON)" in note and "--quarantine-on" in note


def test_what_is_asked_for_is_written_also_that_nothing_is(tmp_path: Path) -> None:
    made = node_part(tmp_path)
    assert made.quarantine_keys("ecc xid") == {"QUARANTINE_ON": "ecc xid"}
    assert made.quarantine_keys("") == {"QUARANTINE_ON": ""}
    assert made.notes == []


def test_what_the_file_says_stands(tmp_path: Path) -> None:
    made = node_part(tmp_path, "QUARANTINE_ON=ecc\n")
    assert made.quarantine_keys(None) == {}
    assert made.notes == []
    with pytest.raises(InstallError, match="says QUARANTINE_ON=ecc; change it there"):
        made.quarantine_keys("xid")


def test_a_word_that_is_no_cause_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--quarantine-on: fan lost: not one of xid ecc missing"):
        node_part(tmp_path).quarantine_keys("xid fan lost")
