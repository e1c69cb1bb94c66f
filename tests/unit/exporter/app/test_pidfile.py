# SPDX-License-Identifier: Apache-2.0
"""One exporter writes a folder, and a signal reaches that one or nobody."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from gpulock_exporter.app.pidfile import (
    LOCK,
    FolderHold,
    NotRunningError,
    is_disk_full,
    signal_exporter,
    signal_user_process,
)

from gpulock.errors import Refusal
from gpulock.node.procfs import Proc
from gpulock.node.sample import FINISHED, WRITER, find_running_exporter
from gpulock.store import atomic
from tests.support.exporter_folder import hold_exporter_folder
from tests.support.faults import disk_full

HERE = f"{os.getpid()} {Proc().start(os.getpid())}\n"


@pytest.mark.parametrize(
    "left",
    [
        *(None, "", "1", "1 1", "-1 1", "0 0", "99999999 1", "PID", "PID 1", "PID START 1"),
        *("x" * 99, f"{'9' * 18} {'9' * 18}", "\udcff 1"),
    ],
)
def test_nobody_to_tell_is_said_and_nobody_else_is_told(tmp_path: Path, left: str | None) -> None:
    folder = str(tmp_path)
    if left is not None:
        pid, start = HERE.split()
        text = left.replace("PID", pid).replace("START", start)
        (tmp_path / WRITER).write_text(text, errors="surrogateescape")
    with pytest.raises(NotRunningError):
        signal_exporter(folder, signal.SIGUSR1)


def test_a_process_of_another_user_than_the_files_is_not_told(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        with pytest.raises(NotRunningError):
            signal_user_process(process.pid, os.getuid() + 1, signal.SIGTERM)
        assert process.poll() is None
        signal_user_process(process.pid, os.getuid(), signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_a_second_one_is_refused_and_the_first_stays_the_one_to_tell(tmp_path: Path) -> None:
    with hold_exporter_folder(str(tmp_path)):
        with pytest.raises(Refusal, match=f"another gpulock-exporter writes {tmp_path}"):
            hold_exporter_folder(str(tmp_path)).__enter__()
        assert (tmp_path / WRITER).read_text() == HERE
        assert find_running_exporter(str(tmp_path)) == os.getpid()


def test_a_folder_that_was_removed_is_made_again_and_held(tmp_path: Path) -> None:
    folder = tmp_path / "exporter"
    hold = FolderHold(str(folder))
    hold.take()
    shutil.rmtree(folder)
    hold.take()
    assert sorted(os.listdir(folder)) == [FINISHED, LOCK, WRITER]
    assert find_running_exporter(str(folder)) == os.getpid()
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


def test_a_full_disk_is_told_apart_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = FolderHold(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_descriptor", disk_full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/pid'") as caught:
            hold.take()
    assert is_disk_full(caught.value)
    assert not is_disk_full(PermissionError(errno.EACCES, "no"))
    hold.take()
    assert (tmp_path / WRITER).read_text() == HERE
    hold.release()


def test_files_that_a_killed_one_left_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / WRITER).write_text("4711\n")
    (tmp_path / LOCK).touch(0o600)
    with hold_exporter_folder(str(tmp_path)):
        assert (tmp_path / WRITER).read_text() == HERE


def test_every_user_may_read_who_runs_and_none_may_open_the_lock(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with hold_exporter_folder(str(tmp_path)):
            modes = {
                path.name: path.stat().st_mode & 0o777
                for path in tmp_path.iterdir()
                if path.is_file()
            }
    finally:
        os.umask(before)
    assert modes == {WRITER: 0o644, LOCK: 0o600}


def test_root_who_asks_leaves_nothing_that_an_exporter_could_not_open(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError):
        signal_exporter(str(tmp_path), signal.SIGUSR1)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(Refusal):
        hold_exporter_folder(str(tmp_path)).__enter__()
    assert (tmp_path / "precious").read_text() == "kept"
