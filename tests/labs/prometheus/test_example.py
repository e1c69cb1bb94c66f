# SPDX-License-Identifier: Apache-2.0
"""docs/examples/prometheus: promtool takes it, with the rules beside it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.labs.prometheus.lab import RULES, program

pytestmark = pytest.mark.lab
EXAMPLE = Path(__file__).parents[3] / "docs/examples/prometheus/prometheus.yml"


def test_promtool_accepts_the_configuration_beside_the_shipped_rules(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copytree(RULES, tmp_path / "rules")
    command = [program("promtool"), "check", "config", str(tmp_path / EXAMPLE.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout
