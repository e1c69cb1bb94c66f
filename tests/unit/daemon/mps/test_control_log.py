# SPDX-License-Identifier: Apache-2.0
"""What MPS says by its log is its user's word, who may say anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.mps.unit import read_control_log
from gpulock.job.mps import LOGS


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the log's place in the folder of a card."""
    (tmp_path / LOGS).mkdir()
    return tmp_path / LOGS / "control.log"


def test_the_last_line_of_a_users_log_is_shown_short_and_without_control_characters(
    log: Path,
) -> None:
    log.write_text(f"one\n{'x' * 500}\x1b[2J it ended\n\n")
    said = read_control_log(str(log.parents[1]))
    assert said.endswith("x?[2J it ended")
    assert len(said) == 200


@pytest.mark.timeout(20)
def test_a_fifo_a_link_or_a_log_without_end_is_no_log(log: Path, tmp_path: Path) -> None:
    os.mkfifo(log)
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    (tmp_path / "secret").write_text("root's\n")
    log.symlink_to(tmp_path / "secret")
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    with log.open("wb") as file:
        file.truncate(1 << 33)
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    log.parent.rmdir()
    log.parent.symlink_to(tmp_path)
    (tmp_path / log.name).write_text("root's\n")
    assert read_control_log(str(tmp_path)) == ""
