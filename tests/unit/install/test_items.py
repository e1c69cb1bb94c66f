# SPDX-License-Identifier: Apache-2.0
"""Items: in order, one after another, stopped by name, shown alike for both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.items import (
    ByHand,
    FileItem,
    FolderItem,
    Item,
    Outcome,
    Remainder,
    Wanted,
    run_items,
)
from tests.support.install_site import tree


def site_file(path: Path, wanted: Wanted, *needs: Item) -> Item:
    """Return a line of a file of the site's, which no run may write."""
    left = Remainder("site.conf is to be edited")

    def ask() -> Remainder | None:
        return left if path.exists() != (wanted is Wanted.PRESENT) else None

    return ByHand("site.conf", ask, needs)


class Forgetful(FileItem):
    """A file that never holds what was written, whatever the writer says."""

    def present(self) -> None:
        pass


def file_item(root: Path, name: str, *needs: Item) -> FileItem:
    return FileItem(root / name, f"{name}\n", needs=needs)


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


def test_a_second_run_changes_nothing_and_says_so(tmp_path: Path) -> None:
    items: list[Item] = [file_item(tmp_path, "a")]
    first, _ = run(tmp_path, items, Wanted.PRESENT)
    again, said = run(tmp_path, items, Wanted.PRESENT)

    assert first.verdict("x", Wanted.PRESENT, dry_run=False) == "installed: x"
    assert again.verdict("x", Wanted.PRESENT, dry_run=False) == "nothing to change: x is in force"
    assert said == []

    first, _ = run(tmp_path, items, Wanted.ABSENT)
    again, _ = run(tmp_path, items, Wanted.ABSENT)
    assert first.verdict("x", Wanted.ABSENT, dry_run=False) == "uninstalled: x"
    told = again.verdict("x", Wanted.ABSENT, dry_run=False)
    assert told == "nothing to do: x is not installed here"
    assert [*tree(tmp_path)] == ["state/install.lock"]


def test_the_first_that_fails_ends_a_run_by_its_name(tmp_path: Path) -> None:
    wrong = Forgetful(tmp_path / "b", "b\n")
    items: list[Item] = [file_item(tmp_path, "a"), wrong, file_item(tmp_path, "c")]

    with pytest.raises(
        InstallError, match=rf"file {tmp_path}/b: it does not hold what was written"
    ):
        run(tmp_path, items, Wanted.PRESENT)

    assert [*tree(tmp_path)] == ["a", "state/install.lock"]


def test_what_an_item_needs_stays_while_a_person_has_not_taken_the_item_out(tmp_path: Path) -> None:
    hooks = file_item(tmp_path, "hooks")
    path, items = tmp_path / "site.conf", [file_item(tmp_path, "map"), hooks]
    installed, _ = run(tmp_path, [*items, site_file(path, Wanted.PRESENT)], Wanted.PRESENT)
    told = installed.verdict("x", Wanted.PRESENT, dry_run=False)
    assert told == "installed, NOT in force: site.conf is to be edited"
    path.touch()
    leading = [*items, site_file(path, Wanted.ABSENT, hooks)]

    left, said = run(tmp_path, leading, Wanted.ABSENT)

    assert said == [
        f"as it is: {hooks.title}, because of site.conf",
        f"removed: file {tmp_path}/map",
    ]
    told = left.verdict("x", Wanted.ABSENT, dry_run=False)
    assert told == "NOT wholly uninstalled: site.conf is to be edited"
    path.unlink()
    assert run(tmp_path, leading, Wanted.ABSENT)[1] == [f"removed: {hooks.title}"]


def test_what_needs_an_item_that_waits_is_not_put_in_place(tmp_path: Path) -> None:
    site = site_file(tmp_path / "site.conf", Wanted.PRESENT)
    items: list[Item] = [site, file_item(tmp_path, "a", site)]

    assert run(tmp_path, items, Wanted.PRESENT)[1] == [
        f"as it is: file {tmp_path}/a, because of site.conf"
    ]
    assert not (tmp_path / "a").exists()


def test_a_folder_is_made_where_none_is_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    items: list[Item] = [FolderItem(folder)]
    run(tmp_path, items, Wanted.PRESENT)
    assert folder.stat().st_mode & 0o777 == 0o755
    folder.chmod(0o700)

    assert run(tmp_path, items, Wanted.PRESENT)[0].changed == []
    assert run(tmp_path, items, Wanted.ABSENT)[0].changed == []
    assert folder.stat().st_mode & 0o777 == 0o700
