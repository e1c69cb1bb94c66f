# SPDX-License-Identifier: Apache-2.0
"""The labs upgrade from the release that is named, or say that it is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.older import NoOlderReleaseError, read_older_archive


def test_where_there_is_no_older_release_the_labs_say_so(tmp_path: Path) -> None:
    """A shallow clone, and a root without git, upgraded from this same tree in silence."""
    with pytest.raises(NoOlderReleaseError, match=r"no older release 0{8} .*GPULOCK_OLDER=FILE"):
        read_older_archive("0" * 8, tmp_path)


def test_a_machine_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoOlderReleaseError, match="No such file or directory: 'git'"):
        read_older_archive("HEAD")


def test_an_archive_that_is_handed_in_is_taken(tmp_path: Path) -> None:
    handed = tmp_path / "older.tar"
    handed.write_bytes(b"of an older tree")
    assert read_older_archive(str(handed)) == b"of an older tree"
