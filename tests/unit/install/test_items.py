# SPDX-License-Identifier: Apache-2.0
"""Items: in order, one after another, on disk whole, shown alike for both ways."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.files import LOCK, InstallError
from gpulock.install.items import ByHand, FileItem, Item, Outcome, Remainder, Wanted, run_items
from tests.support.install_site import tree


def site_file(path: Path, wanted: Wanted) -> Item:
    """Return a line of a file of the site's, which no run may write."""
    left = Remainder("site.conf is to be edited")

    def ask() -> Remainder | None:
        return left if path.exists() != (wanted is Wanted.PRESENT) else None

    return ByHand("site.conf", ask)


class Forgetful(FileItem):
    """A file that never holds what was written, whatever the writer says."""

    def write(self, wanted: Wanted) -> None:
        pass


def file_item(root: Path, name: str) -> FileItem:
    return FileItem(root / name, f"{name}\n")


def run(
    root: Path, items: list[Item], wanted: Wanted, dry_run: bool = False
) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    return run_items(items, wanted, root / "state", said.append, dry_run), said


def test_a_dry_run_shows_the_difference_of_both_ways_and_changes_nothing(tmp_path: Path) -> None:
    items: list[Item] = [file_item(tmp_path, "a"), file_item(tmp_path, "b")]
    shown = run(tmp_path, items, Wanted.PRESENT, dry_run=True)[1]
    assert shown == [f"file {tmp_path}/a", "  + a", f"file {tmp_path}/b", "  + b"]
    assert tree(tmp_path) == {}

    run(tmp_path, items, Wanted.PRESENT)
    before = tree(tmp_path)
    gone, shown = run(tmp_path, items, Wanted.ABSENT, dry_run=True)

    assert shown == [f"file {tmp_path}/b", "  - b", f"file {tmp_path}/a", "  - a"]
    assert gone.verdict("x", Wanted.ABSENT, dry_run=True) == "2 changes would be made"
    assert tree(tmp_path) == before


def test_the_first_that_fails_ends_a_run_by_its_name(tmp_path: Path) -> None:
    wrong = Forgetful(tmp_path / "b", "b\n")
    items: list[Item] = [file_item(tmp_path, "a"), wrong, file_item(tmp_path, "c")]

    with pytest.raises(
        InstallError, match=rf"file {tmp_path}/b: it does not hold what was written"
    ):
        run(tmp_path, items, Wanted.PRESENT)

    assert [*tree(tmp_path)] == ["a", "state/install.lock"]


def test_what_comes_before_a_line_that_a_person_has_not_taken_out_stays(tmp_path: Path) -> None:
    path, hooks = tmp_path / "site.conf", file_item(tmp_path, "hooks")
    present = [hooks, site_file(path, Wanted.PRESENT), file_item(tmp_path, "more")]
    installed, said = run(tmp_path, present, Wanted.PRESENT)
    told = installed.verdict("x", Wanted.PRESENT, dry_run=False)
    assert told == "installed, NOT in force: site.conf is to be edited"
    assert said[1:] == [f"as it is: file {tmp_path}/more, because of site.conf"]
    path.touch()
    leading = [hooks, site_file(path, Wanted.ABSENT), file_item(tmp_path, "more")]
    leading[2].write(Wanted.PRESENT)

    left, said = run(tmp_path, leading, Wanted.ABSENT)

    assert said == [
        f"removed: file {tmp_path}/more",
        f"as it is: {hooks.title}, because of site.conf",
    ]
    told = left.verdict("x", Wanted.ABSENT, dry_run=False)
    assert told == "NOT wholly uninstalled: site.conf is to be edited"
    path.unlink()
    assert run(tmp_path, leading, Wanted.ABSENT)[1] == [f"removed: {hooks.title}"]


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
