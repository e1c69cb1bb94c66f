# SPDX-License-Identifier: Apache-2.0
"""The rules that gpulock ships, by promtool: each as it is shipped, with its own durations."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.labs.prometheus.lab import ROOT, RULES, program, shipped
from tests.support.pairs import zip_equal

pytestmark = pytest.mark.lab
TESTS = ROOT / "tests" / "rules"
EXAMPLE = ROOT / "docs/examples/prometheus/prometheus.yml"


def promtool(*words: str | Path) -> str:
    """Return what promtool said; raise for a complaint."""
    command = [program("promtool"), *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_has_no_complaint_about_the_rules_or_the_example(tmp_path: Path) -> None:
    assert "job_name: gpulock " in EXAMPLE.read_text(), "the rules need that name"
    files = sorted(RULES.glob("*.yml"))
    assert promtool("check", "rules", "--lint-fatal", *files).count("SUCCESS") == len(files)
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copytree(RULES, tmp_path / "rules")
    assert "2 rule files found" in promtool("check", "config", tmp_path / EXAMPLE.name)


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.yml")))
def test_each_rule_does_what_its_test_says(name: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS / name)


def test_every_sentence_of_an_alert_can_be_said(tmp_path: Path) -> None:
    said = sentences(tmp_path)
    assert set(said) == set(re.findall(r"- alert: (\w+)", "".join(shipped().values())))
    assert [text for texts in said.values() for text in texts if not is_sentence(text)] == []


def sentences(folder: Path) -> dict[str, list[str]]:
    """Return what each alert says when it fires: promtool shows it when it expects none."""
    found = yaml.safe_load((TESTS / "alerts.yml").read_text())
    found["rule_files"] = [str(path) for path in RULES.glob("*.yml")]
    for test in found["tests"]:
        fires = [one for one in test.pop("promql_expr_test") if one.get("exp_samples")]
        names = [re.findall(r'alertname="(\w+)"', one["expr"])[0] for one in fires]
        test["alert_rule_test"] = [
            {"eval_time": one["eval_time"], "alertname": name, "exp_alerts": []}
            for name, one in zip_equal(names, fires)
        ]
    path = folder / "alerts.json"
    path.write_text(json.dumps(found))
    command = [program("promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    said: dict[str, list[str]] = {}
    for part in (done.stdout + done.stderr).split("alertname: ")[1:]:
        text = re.findall(r'(?:description|summary)="((?:[^"\\]|\\.)*)"', part)
        said.setdefault(part.partition(",")[0], []).extend(text)
    return said


def is_sentence(text: str) -> bool:
    """Return whether a text says something, and has no name or value left out."""
    left_out = ("error expanding", "<no value>", "{{", "  ", " :", "GPU  ", "of  ")
    return len(text) > 20 and not any(part in text for part in left_out)
