# SPDX-License-Identifier: Apache-2.0
"""A settings file with a fault stops no job where the settings that root obeyed last are known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node import setting_keys, settings, settings_file
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.store import atomic
from tests.support.faults import (
    disk_full,
    plant_fifo,
    plant_folder,
    plant_link,
    raising,
    replace_text,
)

COPY = "settings.obeyed"
OLD = 1_000_000_000  # seconds since the epoch, long ago


@pytest.fixture(autouse=True)
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default STATE_DIR, which is not this machine's."""
    folder = tmp_path / "default"
    keys = [(n, k, str(folder) if n == "STATE_DIR" else d, m) for n, k, d, m in setting_keys.SEAMS]
    monkeypatch.setattr(settings, "SEAMS", tuple(keys))
    return folder


class File:
    """One settings file, and the STATE_DIR that it names; each change is an hour after the last."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.state = root / "gpulock.conf", root / "state"
        self.state.mkdir(mode=0o755, parents=True)
        self.copy = self.state / COPY
        self.changed = OLD
        real = os.stat

        def stat(path: Path | str, *, follow_symlinks: bool = True) -> os.stat_result:
            info = real(path, follow_symlinks=follow_symlinks)
            return os.stat_result([*info[:9], self.changed]) if path == str(self.path) else info

        monkeypatch.setattr(os, "stat", stat)

    def write(self, text: str, mode: int = 0o644) -> None:
        self.path.write_text(f"STATE_DIR={self.state}\n{text}")
        self.path.chmod(mode)
        self.changed += 3600

    def read(self, keep: bool = True) -> Settings:
        return read_settings(str(self.path), keep=keep)

    def refused(self) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.read()
        assert caught.value.kind == UNKNOWN
        return caught.value


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> File:
    return File(tmp_path, monkeypatch)


MALFORMED = [
    "no equals sign",
    "SLURM_WAIT=soon",
    "gups=8",
    "ON_BUSY=error\nON_BUSY=error",
    "\0",
    "CDI_DIR=/run/a\0",
    "DRIVER_DIR=/opt/driver # kept",
    "SIMULATION=/nonexistent/marker",
]


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_file_leaves_the_settings_as_root_obeyed_them_last(
    file: File, line: str
) -> None:
    file.write("EXPECTED_GPUS=4\nSGE_CELL=' a\"b '\nALLOWED_PROCESSES=a b\n")
    before = file.read()
    file.write(f"EXPECTED_GPUS=8\n{line}\n")

    found = file.read()

    names = [key[0].lower() for key in setting_keys.KEYS + setting_keys.SEAMS]
    assert [getattr(found, name) for name in names] == [getattr(before, name) for name in names]
    assert found.path == str(file.path)
    assert f"{file.path}:" in found.faults[0]
    assert f"the settings obeyed last stay in force ({file.copy})" in found.faults[0]


def test_a_copy_is_written_once_and_by_who_keeps_it_alone(file: File) -> None:
    file.write("EXPECTED_GPUS=4\n")
    file.read(keep=False)
    assert not file.copy.exists()
    file.read()
    first = file.copy.stat()
    file.read()
    assert file.copy.stat().st_ino == first.st_ino


def test_a_file_that_changed_a_moment_ago_may_change_again_unseen(file: File) -> None:
    """Two changes within one tick of the clock leave the same time."""
    file.write("EXPECTED_GPUS=4\n")
    file.changed = int(time.time())
    file.read()
    file.path.write_text(f"STATE_DIR={file.state}\nEXPECTED_GPUS=5\n")
    file.read()
    file.write("nonsense\n")

    assert file.read().expected_gpus == 5


def test_a_copy_that_cannot_follow_is_removed(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be the last one."""
    file.write("ON_BUSY=requeue\n")
    file.read()
    file.write("ON_BUSY=error\n")
    with monkeypatch.context() as full:
        full.setattr(atomic, "replace_file", disk_full)
        assert file.read().on_busy == "error"
    file.write("nonsense\n")

    file.refused()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_who_may_not_read_the_file_may_not_read_the_copy(file: File, mode: int) -> None:
    file.write("PROMETHEUS_URL=http://a:password@b\n", mode)
    if os.geteuid() == 0:
        os.chown(file.path, -1, 12345)
    file.read()

    copy = file.copy.stat()
    assert (copy.st_mode & 0o777, copy.st_gid) == (mode, file.path.stat().st_gid)


def of_a_user(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder be another user's."""
    real = os.stat

    def stat(path: Path | str, *, follow_symlinks: bool = True) -> os.stat_result:
        info = real(path, follow_symlinks=follow_symlinks)
        other = [*info[:4], 12345, *info[5:10]]
        return os.stat_result(other) if path == str(theirs) else info

    monkeypatch.setattr(os, "stat", stat)


@pytest.mark.parametrize("spoil", ["mode 664", "mode 646", "a user's"])
def test_a_file_that_others_may_write_says_nothing_and_the_last_good_one_counts(
    file: File, default: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """A umask of 002 where it was pushed from; nobody gains who wrote into it meanwhile."""
    at_the_default(file, default)
    file.path.write_text("EXPECTED_GPUS=8\nISOLATION=cgroup\n")
    file.changed += 3600
    if spoil == "a user's":
        of_a_user(file.path, monkeypatch)
    else:
        file.path.chmod(int(spoil.split()[1], 8))

    found = file.read()

    assert (found.expected_gpus, found.isolation) == (4, "off")
    assert f"{file.path}: belongs to uid" in found.faults[0]
    assert f"the settings obeyed last stay in force ({default}/{COPY})" in found.faults[0]
    file.changed += 3600
    file.read()
    assert "EXPECTED_GPUS=4" in (default / COPY).read_text()


@pytest.mark.parametrize("before", ["EXPECTED_GPUS=4\n", None], ids=["obeyed before", "fresh"])
@pytest.mark.parametrize("name", ["LOCK_DIR", "STATE_DIR"])
def test_the_folders_of_a_real_node_stay_whatever_its_file_says(
    file: File, default: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: str | None
) -> None:
    """Jobs of the same GPUs ran beside each other where one was moved by mistake and put back."""
    monkeypatch.setattr(settings_file, "DEFAULT_PATH", str(file.path))
    if before:
        at_the_default(file, default)
    file.path.write_text(f"ON_BUSY=error\n{name}=/elsewhere\n")
    file.path.chmod(0o644)
    file.changed += 3600

    found = file.read()

    assert (found.lock_dir, found.state_dir) == ("/run/gpulock", str(default))
    assert f"{file.path}:2: {name} cannot be set here" in found.faults[0]
    assert (found.expected_gpus, found.on_busy) == ((4, "requeue") if before else (0, "error"))
    file.path.write_text("")
    file.changed += 3600
    assert (file.read().lock_dir, file.read().state_dir) == ("/run/gpulock", str(default))


SPOILERS: list[Callable[[Path], object]] = [
    lambda copy: copy.chmod(0o664),
    lambda copy: copy.chmod(0o646),
    lambda copy: copy.parent.chmod(0o777),
    lambda copy: replace_text(copy, "the end\n", "the end"),
    lambda copy: replace_text(copy, "# gpulock-settings: the end\n", ""),
    lambda copy: replace_text(copy, "gpulock-settings 2", "gpulock-settings 3"),
    lambda copy: replace_text(copy, "gpulock.conf", "other.conf"),
    lambda copy: replace_text(copy, "=4", "=\0"),
    lambda copy: replace_text(copy, "SGE_CELL=c", "SGE_CELL=\0"),
    lambda copy: replace_text(copy, "=4", "=four"),
    lambda copy: replace_text(copy, str(copy.parent), "/elsewhere"),
    lambda copy: copy.write_bytes(b"\0" * copy.stat().st_size),
    lambda copy: copy.write_text(""),
    plant_link,
    plant_fifo,
    plant_folder,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_copy_that_is_not_whole_or_that_others_could_write_is_none(
    file: File, spoil: Callable[[Path], object]
) -> None:
    file.write("EXPECTED_GPUS=4\nSGE_CELL=c\n")
    file.read()
    spoil(file.copy)
    file.write("nonsense\n")

    file.refused()


@pytest.mark.parametrize("part", ["copy", "state"])
def test_a_copy_of_another_user_is_none(
    file: File, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write("EXPECTED_GPUS=4\n")
    file.read()
    file.write("nonsense\n")
    of_a_user(getattr(file, part), monkeypatch)

    file.refused()


def test_a_copy_of_an_older_version_counts_without_the_keys_that_went(file: File) -> None:
    file.write("EXPECTED_GPUS=4\n")
    file.read()
    text = file.copy.read_text()
    file.copy.write_text(text.replace("EXPECTED_GPUS", "SERVICES=a\nEXPECTED_GPUS"))
    file.write("nonsense\n")

    assert file.read().expected_gpus == 4


@pytest.mark.parametrize(
    ("before", "line", "kept"),
    [
        ("off", "ISOLATION=cgroup", False),
        ("off", "ISOLATION=groop", False),
        ("off", "ISOLATION cgroup", False),
        ("off", "isolation=cgroup", False),
        ("off", "ISOLATION='off'", True),
        ("off", "# ISOLATION=cgroup", True),
        ("cgroup", "ISOLATION='off'", True),
        ("cgroup", "ISOLATION=groop", True),
        ("cgroup", "", True),
    ],
)
def test_the_copy_never_confines_less_than_the_file_asks_for(
    file: File, before: str, line: str, kept: bool
) -> None:
    file.write(f"ISOLATION={before}\n")
    file.read()
    file.write(f"{line}\nnonsense\n")

    if kept:
        assert file.read().isolation == before
    else:
        file.refused()


def test_beside_an_unknown_key_the_last_file_without_one_stays_in_force(file: File) -> None:
    """The unknown one may be another version's name of a key that went, or its misspelling."""
    file.write("ISOLATION=cgroup\nON_BUSY=error\n")
    file.read()
    file.write("ISOLATOIN=cgroup\nON_BUSY=requeue\n")

    for _ in range(2):
        found = file.read()
        assert (found.isolation, found.on_busy) == ("cgroup", "error")
        assert "unknown key 'ISOLATOIN': the settings obeyed last stay in force" in found.faults[0]
    file.write("ON_BUSY=requeue\n")
    assert (file.read().isolation, file.read().faults) == ("off", ())


def at_the_default(file: File, default: Path) -> None:
    default.mkdir(mode=0o755)
    file.path.write_text("EXPECTED_GPUS=4\n")
    file.path.chmod(0o644)
    file.read()


def test_who_may_not_read_the_file_is_refused_whatever_was_obeyed_last(
    file: File, default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_default(file, default)
    with monkeypatch.context() as other:
        other.setattr(atomic, "read_text", raising(PermissionError(13, "Permission denied")))
        assert "Permission denied" in file.refused().why
        assert file.refused().do == "its owner can make it readable: chmod 644"


@pytest.mark.parametrize("fault", ["empty", "gone"])
def test_an_empty_file_or_a_default_one_that_is_gone_takes_nothing_back(
    file: File, default: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The program that rewrites it may have cut it short a moment ago."""
    monkeypatch.setattr(settings_file, "DEFAULT_PATH", str(file.path))
    at_the_default(file, default)
    file.path.write_text("")
    if fault == "gone":
        file.path.unlink()

    found = file.read()

    assert found.expected_gpus == 4
    assert "is empty or gone: the settings obeyed last stay in force" in found.faults[0]
    file.path.write_text("# the defaults\n")
    file.changed += 3600
    assert (file.read().expected_gpus, file.read().faults) == (0, ())


def test_a_file_that_changes_while_it_is_read_has_its_copy_the_next_time(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write("EXPECTED_GPUS=4\n")
    file.read()
    file.write("EXPECTED_GPUS=5\n")
    real = atomic.read_text

    def read(path: str, *more: int) -> str:
        text = real(path, *more)
        if path == str(file.path):
            file.write("EXPECTED_GPUS=6\n")
        return text

    with monkeypatch.context() as busy:
        busy.setattr(atomic, "read_text", read)
        assert file.read().expected_gpus == 5
    assert not file.copy.exists()
    file.read()
    file.write("nonsense\n")
    assert file.read().expected_gpus == 6


def test_settings_made_by_hand_still_refuse_an_unknown_key() -> None:
    with pytest.raises(ValueError, match="unknown key GUPS"):
        Settings({"GUPS": "8"})


def test_the_copy_is_the_whole_file(file: File) -> None:
    text = "# of caf\udce9\nPROMETHEUS_URL=' \"x '\nALLOWED_PROCESSES=a\tb\n\nSGE_CELL=x"
    file.path.write_bytes(f"STATE_DIR={file.state}\n{text}".encode("utf-8", "surrogateescape"))
    before = file.read()

    assert text.encode("utf-8", "surrogateescape") in file.copy.read_bytes()
    file.write("nonsense\n")
    assert file.read().given == before.given
