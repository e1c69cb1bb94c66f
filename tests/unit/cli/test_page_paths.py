# SPDX-License-Identifier: Apache-2.0
"""A page that a message names is one that the person can open."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.cli.session import CommandRefusedError
from gpulock.text import pages


def test_a_page_is_named_by_its_path() -> None:
    said = pages.name_pages("nothing was installed (docs/slurm.md); see docs/facts/slurm.md")

    first, second = said.removeprefix("nothing was installed (").split("); see ")
    assert [Path(path).is_file() and Path(path).is_absolute() for path in (first, second)] == [
        *(True, True)
    ]


def test_a_page_that_is_not_here_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FOLDERS", (tmp_path,))
    assert pages.name_pages("see docs/slurm.md") == "see docs/slurm.md"
    assert pages.name_pages("see https://x/docs/slurm.md") == "see https://x/docs/slurm.md"


def test_a_refusal_names_a_page_by_its_path() -> None:
    message = CommandRefusedError("a release that is not known", "see docs/slurm.md").message
    assert Path(message.rpartition(" ")[2]).is_file()
