# SPDX-License-Identifier: Apache-2.0
"""One gpulockd a node, whatever becomes of LOCK_DIR."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.daemon.core import instance_lock
from gpulock.daemon.core.instance_lock import LOCK_NAME, InstanceLock, find_running_daemon
from gpulock.errors import BUSY, Refusal
from tests.support.trees import let_others_in

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


@pytest.fixture
def first(folder: Path) -> Iterator[InstanceLock]:
    made = InstanceLock()
    made.take(str(folder))
    yield made
    made.release()


def refused(folder: Path) -> Refusal:
    other = InstanceLock()
    with pytest.raises(Refusal) as caught:
        other.take(str(folder))
    other.release()
    return caught.value


def test_in_a_recreated_lock_directory_the_lock_is_taken_again(
    first: InstanceLock, folder: Path
) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    first.take(str(folder))
    assert refused(folder).kind == BUSY


def test_a_daemon_is_seen_to_run_by_the_lock_that_it_holds_and_no_file_of_others_is_looked_at(
    folder: Path, tmp_path: Path
) -> None:
    assert find_running_daemon(str(folder), "/proc") is None
    lock = InstanceLock()
    lock.take(str(folder))
    assert find_running_daemon(str(folder), "/proc") == os.getpid()
    assert find_running_daemon(str(folder), str(tmp_path)) is None, "nothing is to be seen"
    lock.release()
    with (folder / LOCK_NAME).open():  # who has it open has no lock
        assert find_running_daemon(str(folder), "/proc") is None


@pytest.mark.another_user
def test_every_user_sees_that_a_daemon_runs(first: InstanceLock, folder: Path) -> None:
    let_others_in(folder)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os._exit(find_running_daemon(str(folder), "/proc") != os.getppid())
    assert os.waitpid(pid, 0)[1] == 0


def test_who_is_refused_is_told_where_to_look(
    first: InstanceLock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(folder).do == f"see systemctl status {os.getpid()}"
    monkeypatch.setattr(instance_lock, "find_running_daemon", lambda *_: None)
    assert refused(folder).do == f"see fuser -v {folder}/daemon"
