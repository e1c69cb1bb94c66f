# SPDX-License-Identifier: Apache-2.0
"""Notes of devices that are out: they count even when they cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.errors import Refusal
from gpulock.store import kv, quarantine
from gpulock.store.quarantine import FOLDER, QUARANTINE, RESERVE
from tests.support.trees import bus


@pytest.fixture
def state(tmp_path: Path) -> str:
    (tmp_path / FOLDER).mkdir()
    return str(tmp_path)


def test_a_note_says_when_by_whom_and_why(state: str) -> None:
    quarantine.write_device_note(state, QUARANTINE, bus(1), "root", "ECC errors")
    quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "fan")
    assert quarantine.list_noted_devices(state, QUARANTINE) == [bus(0), bus(1)]
    assert quarantine.list_noted_devices(state, RESERVE) == []
    found = quarantine.read_device_note(state, QUARANTINE, bus(1))
    assert (found["by"], found["reason"], float(found["at"]) > 0) == ("root", "ECC errors", True)


@pytest.mark.parametrize("text", ["", "garbage", "by=a\nby=b\n", "\0\0\0", None])
def test_a_note_that_is_garbage_or_a_fifo_still_counts(state: str, text: str | None) -> None:
    note = Path(state, FOLDER, bus(0))
    os.mkfifo(note) if text is None else note.write_text(text)
    assert quarantine.list_noted_devices(state, QUARANTINE) == [bus(0)]
    assert "by" not in quarantine.read_device_note(state, QUARANTINE, bus(0))


def test_a_reason_of_two_lines_is_refused_and_nothing_is_noted(state: str) -> None:
    with pytest.raises(kv.MalformedError):
        quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "a\nat=0")
    assert quarantine.list_noted_devices(state, QUARANTINE) == []


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the paths that were made to survive a power cut, in order."""
    paths: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_a_note_and_its_name_are_on_the_disk_when_it_is_put(state: str, synced: list[str]) -> None:
    quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "fan")
    written, *folders = synced
    assert written.startswith(f"{state}/{FOLDER}/.{bus(0)}."), "before it has its name"
    assert folders == [f"{state}/{FOLDER}", state]


def test_a_note_that_was_taken_back_is_gone_from_the_disk(state: str, synced: list[str]) -> None:
    quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "fan")
    synced.clear()
    quarantine.remove_device_note(state, QUARANTINE, bus(0))
    assert synced == [f"{state}/{FOLDER}"]


def test_what_an_interrupted_note_left_does_not_count(state: str) -> None:
    Path(state, FOLDER, f".{bus(0)}.abc").touch()
    assert quarantine.list_noted_devices(state, QUARANTINE) == []


def test_a_folder_that_is_not_there_is_no_empty_list(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="GPUs that were out of service may be granted"):
        quarantine.list_noted_devices(str(tmp_path), QUARANTINE)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(state: str) -> None:
    folder = Path(state, FOLDER)
    if folder.exists():
        folder.rmdir()
    folder.write_text("")
    with pytest.raises(Refusal, match="Not a directory"):
        quarantine.list_noted_devices(state, QUARANTINE)
