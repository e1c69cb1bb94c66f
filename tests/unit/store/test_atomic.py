# SPDX-License-Identifier: Apache-2.0
"""Reading what may have been planted; replacing whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulock.store import atomic
from tests.support.faults import disk_full, plant_fifo, plant_folder, plant_link


@pytest.mark.parametrize("plant", [plant_fifo, plant_link, plant_folder])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    (tmp_path / "file").write_text("secret")
    plant(tmp_path / "file")
    with pytest.raises(OSError):
        atomic.read_file(str(tmp_path / "file"))


def test_a_huge_sparse_file_is_refused_before_memory_is_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)
    asked: list[int] = []
    read = os.read

    def small(fd: int, count: int) -> bytes:
        asked.append(count)
        return read(fd, min(count, 1 << 16))

    monkeypatch.setattr(os, "read", small)
    with pytest.raises(OSError) as caught:
        atomic.read_file(str(path))
    assert caught.value.errno == errno.EFBIG
    assert max(asked, default=0) <= 2 * atomic.LIMIT


@pytest.mark.parametrize("name", ["file", "/proc/self/status"])
def test_no_more_than_the_limit_is_read_also_where_a_file_says_it_is_empty(
    tmp_path: Path, name: str
) -> None:
    """So say all files of /proc."""
    (tmp_path / "file").write_bytes(b"x" * 101)
    assert len(atomic.read_file(str(tmp_path / "file"), 101)) == 101
    with pytest.raises(OSError) as caught:
        atomic.read_file(str(tmp_path / name), 100)
    assert caught.value.errno == errno.EFBIG


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret")
    plant_link(tmp_path / "file")
    atomic.replace_file(str(tmp_path / "file"), b"new")
    assert (tmp_path / "real").read_text() == "secret"
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("call", ["write", "fchmod", "rename"])
def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, call, disk_full)
    with pytest.raises(OSError):
        atomic.replace_file(str(path), b"new")
    monkeypatch.undo()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])


def test_a_folder_goes_with_all_that_is_in_it_but_not_through_links(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/file").write_text("x")
    folder = tmp_path / "lock"
    (folder / "anchors").mkdir(parents=True)
    (folder / "anchors/1.2").write_text("x")
    for link in (folder / "link", tmp_path / "instead"):
        link.symlink_to(tmp_path / "keep")
    atomic.remove_folder(str(folder))
    atomic.remove_folder(str(tmp_path / "instead"))
    assert sorted(os.listdir(tmp_path)) == ["keep"]
    assert (tmp_path / "keep/file").read_text() == "x"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name_and_then_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition(".r")[0])
        fsync(fd)

    def move(*args: Any, **named: Any) -> None:
        calls.append("rename")
        rename(*args, **named)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", move)
    atomic.replace_file(f"{tmp_path}/record", b"new", durable=True)
    assert calls == ["", "rename", tmp_path.name]
    atomic.replace_file(f"{tmp_path}/record", b"newer")
    assert calls[3:] == ["rename"]
