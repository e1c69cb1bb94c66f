# SPDX-License-Identifier: Apache-2.0
"""The rules that gpulock ships, by promtool: each as it is shipped, with its own durations."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.labs.prometheus_lab import ROOT, RULES, program

pytestmark = pytest.mark.lab
TESTS = ROOT / "tests" / "rules"


def promtool(*words: str | Path) -> str:
    """Return what promtool said; raise for a complaint."""
    command = [program("promtool"), *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_has_no_complaint_about_the_rules() -> None:
    files = sorted(RULES.glob("*.yml"))
    assert promtool("check", "rules", "--lint-fatal", *files).count("SUCCESS") == len(files)


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.yml")))
def test_each_rule_does_what_its_test_says(name: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS / name)
