# SPDX-License-Identifier: Apache-2.0
"""`make docs` makes a site of the pages; a link or an anchor that leads nowhere ends it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.soak, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def test_every_link_of_the_site_leads_somewhere() -> None:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    assert "gpulock" in (ROOT / "build/site/docs/slurm.html").read_text()
