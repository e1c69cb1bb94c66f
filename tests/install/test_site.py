# SPDX-License-Identifier: Apache-2.0
"""`make docs` makes a site of the pages, and ends where a link leads nowhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.soak, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def test_a_link_that_leads_nowhere_ends_the_site(tmp_path: Path) -> None:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    assert "gpulock" in (ROOT / "build/site/docs/slurm.html").read_text()
    shutil.copytree(ROOT / "build/pages", tmp_path / "build/pages")
    (tmp_path / "packaging").mkdir()
    shutil.copy(ROOT / "packaging/site.yml", tmp_path / "packaging")
    page = tmp_path / "build/pages/README.md"
    whole = page.read_text()
    words = [str(ROOT / ".venv/bin/python"), "-m", "mkdocs", "build", "--strict"]
    for link in ("gone.md", "docs/slurm.md#gone"):
        page.write_text(f"{whole}\n[lost]({link})\n")

        done = subprocess.run(
            [*words, "-f", str(tmp_path / "packaging/site.yml")],
            env={"PYTHONPATH": str(ROOT / "build/mkdocs")},
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode != 0 and "gone" in done.stderr
