# SPDX-License-Identifier: Apache-2.0
"""An installation of two files, killed at each call: the engine that all installations share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.change import FilePlace
from gpulock.install.planner import InstallPlan, NodePlanner
from gpulock.install.uninstall import Uninstaller
from tests.support.install_site import ignore
from tests.support.killed import KilledSite

pytestmark = pytest.mark.slow


class FilesUninstaller(Uninstaller):
    """An installation of files alone."""

    scheduler = "files"


class KilledFiles(KilledSite):
    """A node with one file of the site's own."""

    def __init__(self, root: Path) -> None:
        self.config = root / "gpulock.conf"
        root.mkdir()
        self.config.write_text(f"STATE_DIR={root}/state\nLOCK_DIR={root}/lock\n")
        super().__init__(root)

    def plan(self) -> InstallPlan:
        planner = NodePlanner(self.config, "files")
        planner.add_folders()
        planner.add_settings({"EXPECTED_GPUS": "1"})
        planner.add_own(FilePlace(self.root / "etc/new/file"), "x")
        return planner.plan_

    def apply(self) -> None:
        self.plan().apply(ignore)

    def undo(self) -> list[str]:
        return FilesUninstaller(self.config, ignore).uninstall()


def test_an_installation_killed_anywhere_is_taken_back_or_completed(tmp_path: Path) -> None:
    assert KilledFiles(tmp_path / "site").killed_installations(1) == []


def test_an_uninstallation_killed_anywhere_is_completed_by_another(tmp_path: Path) -> None:
    assert KilledFiles(tmp_path / "site").killed_uninstallations(1) == []
