# SPDX-License-Identifier: Apache-2.0
"""One exporter writes a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gpulock_exporter.app.folder import LOCK, FolderHold

from gpulock.errors import Refusal
from gpulock.node.sample import FINISHED
from tests.support.exporter_folder import hold_exporter_folder


def test_a_folder_that_was_removed_is_made_again_and_held(tmp_path: Path) -> None:
    folder = tmp_path / "exporter"
    hold = FolderHold(str(folder))
    hold.take()
    shutil.rmtree(folder)
    hold.take()
    assert sorted(os.listdir(folder)) == [FINISHED, LOCK]
    with pytest.raises(Refusal, match="another gpulock-exporter writes"):
        FolderHold(str(folder)).take()
    shutil.rmtree(folder)
    other = FolderHold(str(folder))
    other.take()
    with pytest.raises(Refusal, match="another gpulock-exporter writes"):
        hold.take()
    other.release()
    hold.take()
    hold.release()


def test_no_other_user_may_open_the_lock_that_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch(0o600)
    with hold_exporter_folder(str(tmp_path)):
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(Refusal):
        hold_exporter_folder(str(tmp_path)).__enter__()
    assert (tmp_path / "precious").read_text() == "kept"
