# SPDX-License-Identifier: Apache-2.0
"""One exporter writes a folder, and a file in it asks for a pause."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
from gpulock_exporter.app.folder import (
    LOCK,
    LONGEST_PAUSE,
    PAUSE,
    FolderHold,
    ask_for_pause,
    end_pause,
    is_pause_asked,
)

from gpulock.errors import Refusal
from gpulock.node.sample import FINISHED
from tests.support.exporter_folder import hold_exporter_folder


def test_a_pause_is_asked_for_until_it_ends_or_is_too_old(tmp_path: Path) -> None:
    folder = str(tmp_path)
    end_pause(folder)
    assert not is_pause_asked(folder)
    for _ in range(2):
        ask_for_pause(folder)
        assert is_pause_asked(folder)
    end_pause(folder)
    assert not is_pause_asked(folder)
    ask_for_pause(folder)
    for age in (LONGEST_PAUSE + 5, -LONGEST_PAUSE - 5):  # the clock was set back since
        os.utime(tmp_path / PAUSE, times=(0, time.time() - age))
        assert not is_pause_asked(folder)


def test_a_link_in_place_of_a_pause_is_not_followed(tmp_path: Path) -> None:
    """The folder is the exporter's user's, and root asks."""
    (tmp_path / PAUSE).symlink_to("precious")
    ask_for_pause(str(tmp_path))
    assert [one.name for one in tmp_path.iterdir()] == [PAUSE]
    assert stat.S_ISREG((tmp_path / PAUSE).lstat().st_mode)


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
