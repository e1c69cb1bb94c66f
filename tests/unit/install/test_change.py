# SPDX-License-Identifier: Apache-2.0
"""A change is shown, made once, noted before it is made, and taken back only where it is ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.change import (
    Change,
    FilePlace,
    FolderPlace,
    InstallRecord,
    Place,
    SettingsPlace,
    apply_changes,
    lock_installation,
    plan_place_change,
)
from gpulock.install.hooks import InstallError
from gpulock.install.undo import Uninstaller, undo_recorded_changes
from tests.support.install_site import ignore


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


def list_disk_writes(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """Return a list that names, in order, what is synced, renamed or removed below a folder."""
    found: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*words: Any, **about: Any) -> Any:
            told = os.readlink(f"/proc/self/fd/{words[0]}") if name == "fsync" else str(words[-1])
            told = re.sub(r"\.([a-z.]+)\.\d+\.[0-9a-f]{12}$", r"new \1", told)
            found.append(f"{name} {told.replace(str(root), '.')}")
            return real(*words, **about)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "unlink"):
        spy(name)
    return found


def test_a_change_is_on_disk_after_its_note_and_both_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut at any instant there is no change that cannot be taken back."""
    (tmp_path / "state").mkdir()
    record = InstallRecord(tmp_path / "state/sge.json")
    place = FilePlace(tmp_path / "etc/conf")
    writes = list_disk_writes(monkeypatch, tmp_path)
    apply_changes(list(plan_place_change(place, "new\n")), record, writes.append)
    assert writes == [
        *("fsync ./state/new sge.json", "rename ./state/sge.json", "fsync ./state"),
        "fsync .",  # in which ./etc is new
        *("fsync ./etc/new conf", "rename ./etc/conf", "fsync ./etc"),
        f"done: file {place.path}",
    ]
    writes.clear()
    undo_recorded_changes(record, place_of, ignore, never)
    assert writes == [
        *("unlink ./etc/conf", "fsync ./etc"),
        *("unlink ./state/sge.json", "fsync ./state"),
    ]


def test_undo_gives_back_the_first_value_after_two_installations(tmp_path: Path) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    place.write("first")
    for value in ("second", "third"):
        apply_changes(list(plan_place_change(place, value)), record, ignore)

    assert undo_recorded_changes(record, place_of, ignore, never) == []

    assert place.read() == "first"
    assert not record.path.exists()


def test_undo_keeps_what_an_administrator_wrote_into_the_settings_between_two(
    tmp_path: Path,
) -> None:
    place, record = SettingsPlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    apply_changes(list(plan_place_change(place, "A=1\n")), record, ignore)
    place.write("A=1\nTHEIRS=1\n")
    apply_changes(list(plan_place_change(place, "A=1\nTHEIRS=1\nB=1\n")), record, ignore)
    assert undo_recorded_changes(record, place_of, ignore, never) == []
    assert place.read() == "A=1\nTHEIRS=1\n"


def test_undo_of_settings_that_nobody_else_wrote_gives_back_the_first(tmp_path: Path) -> None:
    place, record = SettingsPlace(tmp_path / "f"), InstallRecord(tmp_path / "record")
    record.note(Change(place, None, "never made"))
    for value in ("A=1\n", "A=1\nB=1\n"):
        apply_changes(list(plan_place_change(place, value)), record, ignore)
    assert undo_recorded_changes(record, place_of, ignore, never) == []
    assert place.read() is None


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


def test_what_others_lead_to_is_taken_back_after_them_whatever_the_order(tmp_path: Path) -> None:
    hook, text = FilePlace(tmp_path / "hook"), FilePlace(tmp_path / "text")
    record, told = InstallRecord(tmp_path / "record"), list[str]()
    for place in (hook, text):
        apply_changes(list(plan_place_change(place, "ours")), record, ignore)

    def hook_leads_to_it(address: tuple[str, ...]) -> str:
        return "the hook leads to it" if address == text.address and hook.read() else ""

    assert undo_recorded_changes(record, place_of, told.append, hook_leads_to_it) == []
    assert told == [f"put back: file {hook.path}", f"put back: file {text.path}"]
    assert not record.path.exists()


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


HOLD = """
import sys
from pathlib import Path
from typing import Any
from gpulock.install.change import lock_installation
with lock_installation(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process change the installation, until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "install")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        assert process.stdin
        process.stdin.close()


def test_the_second_installation_is_told_which_process_makes_the_first(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    place, record = FilePlace(tmp_path / "f"), InstallRecord(tmp_path / "install/sge.json")
    changes = list(plan_place_change(place, "x"))

    with pytest.raises(InstallError, match=rf"runs already, as process {holder.pid};"):
        apply_changes(changes, record, ignore)

    assert (place.read(), record.load()) == (None, {})


def test_an_installation_that_was_killed_keeps_nobody_away(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()

    with lock_installation(tmp_path / "install"):
        assert (tmp_path / "install/lock").read_text() == f"{os.getpid()}\n"


def test_uninstall_waits_for_nobody_and_says_who_installs(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    config, record = tmp_path / "gpulock.conf", InstallRecord(tmp_path / "install/plain.json")
    config.write_text(f"STATE_DIR={tmp_path}\n")
    record.save({("file", str(tmp_path / "f"), "644"): (None, "x")})

    with pytest.raises(InstallError, match=f"process {holder.pid}"):
        Plain(config, ignore).undo()

    assert record.load()


class Plain(Uninstaller):
    """An installation of files alone."""

    scheduler = "plain"


def test_with_the_last_record_its_folder_goes(tmp_path: Path) -> None:
    config, folder = tmp_path / "gpulock.conf", tmp_path / "state/install"
    config.write_text(f"STATE_DIR={tmp_path}/state\n")
    place, record = FilePlace(tmp_path / "f"), InstallRecord(folder / "plain.json")
    apply_changes(list(plan_place_change(place, "x")), record, ignore)

    assert Plain(config, ignore).undo() == []

    assert (place.read(), folder.exists()) == (None, False)
    assert Plain(config, ignore).undo() == []
    assert not folder.exists()
