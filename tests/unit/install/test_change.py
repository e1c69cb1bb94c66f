# SPDX-License-Identifier: Apache-2.0
"""A change is shown, made once, noted before it is made, and taken back only where it is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.change import (
    Change,
    FilePlace,
    FolderPlace,
    InstallRecord,
    Place,
    apply_changes,
    plan_place_change,
    undo_recorded_changes,
)
from gpulock.install.hooks import InstallError


def ignore(_: str) -> None:
    """Take a line that nobody reads."""


def place_of(address: tuple[str, ...]) -> Place:
    return FilePlace(Path(address[1]), int(address[2], 8))


def never(_: tuple[str, ...]) -> str:
    return ""


def test_a_change_shows_what_goes_and_what_comes(tmp_path: Path) -> None:
    change = Change(FilePlace(tmp_path / "f"), "a\nb\n", "a\nc\n")

    assert change.lines() == [f"file {tmp_path}/f", "  - b", "  + c"]


def test_a_value_that_is_there_already_is_no_change(tmp_path: Path) -> None:
    place = FilePlace(tmp_path / "f")
    place.write("x")

    assert list(plan_place_change(place, "x")) == []
    assert len(list(plan_place_change(place, "y"))) == 1


def test_a_place_that_changed_since_it_was_shown_is_not_written(tmp_path: Path) -> None:
    place = FilePlace(tmp_path / "f")
    (change,) = plan_place_change(place, "ours")
    place.write("theirs")

    with pytest.raises(InstallError, match="changed meanwhile"):
        change.apply()

    assert place.read() == "theirs"


def test_undo_gives_back_the_first_value_after_two_installations(tmp_path: Path) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    place.write("first")
    for value in ("second", "third"):
        apply_changes(list(plan_place_change(place, value)), record, ignore)

    assert undo_recorded_changes(record, place_of, ignore, never) == []

    assert place.read() == "first"
    assert not record.path.exists()


def test_undo_of_a_change_that_was_noted_and_never_made_does_nothing(tmp_path: Path) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    record.note(Change(place, None, "x"))

    assert undo_recorded_changes(record, place_of, ignore, never) == []
    assert place.read() is None


def test_what_others_changed_is_left_and_said(tmp_path: Path) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    apply_changes(list(plan_place_change(place, "ours")), record, ignore)
    place.write("theirs")

    (said,) = undo_recorded_changes(record, place_of, ignore, never)

    assert "changed since; left as it is: theirs" in said
    assert place.read() == "theirs"


def test_what_must_stay_is_kept_in_the_record(tmp_path: Path) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    apply_changes(list(plan_place_change(place, "ours")), record, ignore)

    assert undo_recorded_changes(record, place_of, ignore, lambda _: "not now") == ["not now"]
    assert place.read() == "ours"
    assert undo_recorded_changes(record, place_of, ignore, never) == []
    assert place.read() is None


def test_a_record_of_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    record = InstallRecord(tmp_path / "record")
    record.path.write_text('{"version": 9, "changes": []}')

    with pytest.raises(InstallError, match="version 9"):
        record.load()


def test_a_folder_with_something_in_it_is_not_removed(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "d")
    place.write("uid 0, mode 0755")
    (tmp_path / "d/x").touch()

    place.write(None)

    assert (tmp_path / "d/x").exists()
