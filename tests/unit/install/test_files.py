# SPDX-License-Identifier: Apache-2.0
"""A file is written whole and durably, its difference is shown, and one installer runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.files import LOCK
from gpulock.install.items import FileItem, Wanted, run_items


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
    assert [one for one in writes if LOCK not in one] == [
        "fsync .",  # in which ./etc is new
        *("fsync ./etc/new conf", "rename ./etc/conf", "fsync ./etc"),
        f"done: {item.title}",
    ]
    writes.clear()
    run_items([item], Wanted.ABSENT, tmp_path, writes.append)
    assert [one for one in writes if LOCK not in one][:2] == ["unlink ./etc/conf", "fsync ./etc"]
