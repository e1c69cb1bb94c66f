# SPDX-License-Identifier: Apache-2.0
"""A change is shown, made once, noted before it is made; nothing earlier is ever put back."""

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
    apply_changes,
    lock_installation,
    plan_place_change,
)
from gpulock.install.hooks import InstallError, make_public_folder
from gpulock.install.uninstall import Uninstaller
from tests.support.install_site import ignore


class Plain(Uninstaller):
    """An installation of files alone."""

    scheduler = "plain"


def apply(place: Place, value: str, record: InstallRecord) -> None:
    """Give a place of gpulock's own its value."""
    apply_changes(list(plan_place_change(place, value)), record, ignore, {place.address: value})


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    """Give an installation of files alone."""
    config = tmp_path / "gpulock.conf"
    config.write_text(f"STATE_DIR={tmp_path}/state\n")
    return Plain(config, ignore)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Plain
) -> None:
    """After a power cut at any instant there is nothing of gpulock's that no record has."""
    (tmp_path / "state/install").mkdir(parents=True)
    place = FilePlace(tmp_path / "etc/conf")
    writes = list_disk_writes(monkeypatch, tmp_path)
    changes = list(plan_place_change(place, "new\n"))
    apply_changes(changes, plain.record, writes.append)
    noted = "./state/install"
    assert [one for one in writes if "lock" not in one] == [
        *(f"fsync {noted}/new plain.json", f"rename {noted}/plain.json", f"fsync {noted}"),
        "fsync .",  # in which ./etc is new
        *("fsync ./etc/new conf", "rename ./etc/conf", "fsync ./etc"),
        f"done: file {place.path}",
    ]
    writes.clear()
    assert plain.uninstall() == []
    assert [one for one in writes if "lock" not in one][:4] == [
        *("unlink ./etc/conf", "fsync ./etc"),
        *(f"unlink {noted}/plain.json", f"fsync {noted}"),
    ]


def test_no_earlier_value_comes_back_however_often_it_was_installed(
    tmp_path: Path, plain: Plain
) -> None:
    """What stood there first was put back over all that was written since."""
    place = FilePlace(tmp_path / "f")
    place.write("first")
    for value in ("second", "third"):
        apply(place, value, plain.record)

    assert plain.uninstall() == []

    assert place.read() is None
    assert not plain.record.path.exists()


def test_a_place_that_was_noted_and_never_made_is_nothing_to_remove(
    tmp_path: Path, plain: Plain
) -> None:
    place = FilePlace(tmp_path / "f")
    make_public_folder(plain.record.path.parent)
    plain.record.note({place.address: "x"})

    assert plain.uninstall() == []
    assert place.read() is None


def test_what_others_changed_is_left_and_said_until_it_is_gone(
    tmp_path: Path, plain: Plain
) -> None:
    """A second run said that there was nothing to do."""
    place = FilePlace(tmp_path / "f")
    apply(place, "ours", plain.record)
    place.write("theirs")

    for _ in range(2):
        (said,) = plain.uninstall()
        assert said == f"file {place.path} was changed since gpulock wrote it: rm {place.path}"
        assert place.read() == "theirs"

    place.path.unlink()
    assert plain.uninstall() == []


def test_what_must_stay_is_kept_in_the_record(
    tmp_path: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FilePlace(tmp_path / "f")
    apply(place, "ours", plain.record)

    def detach(_: Plain) -> list[str]:
        return ["a queue leads to it"]

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "detach", detach)
        assert plain.uninstall() == ["a queue leads to it"]
    assert place.read() == "ours"
    assert plain.uninstall() == []
    assert place.read() is None


def test_what_stands_already_is_noted_by_the_next_installation(
    tmp_path: Path, plain: Plain
) -> None:
    """STATE_DIR was lost: nothing was to be changed, and so nothing was ever removed."""
    place = FilePlace(tmp_path / "f")
    apply(place, "ours", plain.record)
    plain.record.save({})

    apply(place, "ours", plain.record)

    assert plain.record.load() == {place.address: "ours"}


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

    with pytest.raises(InstallError, match=rf"runs already, as process {holder.pid};"):
        apply(place, "x", record)

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
    record.save({("file", str(tmp_path / "f"), "644"): "x"})

    with pytest.raises(InstallError, match=f"process {holder.pid}"):
        Plain(config, ignore).uninstall()

    assert record.load()


def test_with_the_last_record_its_folder_goes(tmp_path: Path) -> None:
    config, folder = tmp_path / "gpulock.conf", tmp_path / "state/install"
    config.write_text(f"STATE_DIR={tmp_path}/state\n")
    place, record = FilePlace(tmp_path / "f"), InstallRecord(folder / "plain.json")
    apply(place, "x", record)

    assert Plain(config, ignore).uninstall() == []

    assert (place.read(), folder.exists()) == (None, False)
    assert Plain(config, ignore).uninstall() == []
    assert not folder.exists()
