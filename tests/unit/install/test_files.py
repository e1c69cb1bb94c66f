# SPDX-License-Identifier: Apache-2.0
"""A file is written whole and durably, its difference is shown, and one installer runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.files import LOCK, InstallError, lock_installation
from gpulock.install.items import FileItem, Wanted, difference_lines, run_items
from tests.support.install_site import ignore


def test_a_difference_shows_what_goes_and_what_comes() -> None:
    assert difference_lines("a\nb\n", "a\nc\n") == ["  - b", "  + c"]
    assert difference_lines(None, "x") == ["  + x"]
    assert difference_lines("x", "x") == []


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


def test_an_item_is_on_disk_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = FileItem(tmp_path / "etc/conf", "new\n")
    writes = list_disk_writes(monkeypatch, tmp_path)
    run_items([item], Wanted.PRESENT, tmp_path, writes.append)
    assert [one for one in writes if "lock" not in one] == [
        "fsync .",  # in which ./etc is new
        *("fsync ./etc/new conf", "rename ./etc/conf", "fsync ./etc"),
        f"done: {item.title}",
    ]
    writes.clear()
    run_items([item], Wanted.ABSENT, tmp_path, writes.append)
    assert [one for one in writes if "lock" not in one][:2] == ["unlink ./etc/conf", "fsync ./etc"]


HOLD = """
import sys
from pathlib import Path
from typing import Any
from gpulock.install.files import lock_installation
with lock_installation(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process change the installation, until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        assert process.stdin
        process.stdin.close()


def test_the_second_installation_is_told_that_another_runs(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    item = FileItem(tmp_path / "f", "x")

    for wanted in Wanted:
        with pytest.raises(InstallError, match="runs already"):
            run_items([item], wanted, tmp_path, ignore)

    assert item.read() is None


def test_an_installation_that_was_killed_keeps_nobody_away(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()

    with lock_installation(tmp_path):
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
