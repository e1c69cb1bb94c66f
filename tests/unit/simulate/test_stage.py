# SPDX-License-Identifier: Apache-2.0
"""The demo's folder is gone with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gpulock.simulate.stage import open_demo_node


def test_what_a_hook_writes_while_the_folder_is_removed_is_removed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that is being ended writes a file just before its folder would be removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real, disturbed = os.rmdir, list[str]()

    def rmdir(path: str, **where: int) -> None:
        if not disturbed:
            disturbed.append(path)
            fd = os.open(f"{path}/late", os.O_WRONLY | os.O_CREAT, dir_fd=where.get("dir_fd"))
            os.close(fd)
        real(path, **where)

    with open_demo_node():
        monkeypatch.setattr(os, "rmdir", rmdir)
    assert disturbed and os.listdir(tmp_path) == []
