# SPDX-License-Identifier: Apache-2.0
"""The Ansible role is one that Ansible understands, and its part for a Prometheus server works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.soak, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "packaging/ansible"
PARTS = ("node", "controller", "monitoring")


@pytest.fixture(scope="module")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command `ansible-playbook`, of an environment of its own."""
    venv = tmp_path_factory.mktemp("ansible")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "install", "-q", "ansible-core"], check=True)
    local = [
        "-i",
        "localhost,",
        "-c",
        "local",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    return [str(venv / "bin/ansible-playbook"), *local]


def run(playbook: list[str], *words: str | Path) -> str:
    """Run it in the folder of the role; return what it said."""
    command = [*playbook, *map(str, words)]
    done = subprocess.run(command, cwd=ANSIBLE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_understood(playbook: list[str], tmp_path: Path, part: str) -> None:
    run(playbook, "--syntax-check", "site.yml")
    assert (ANSIBLE / f"roles/gpulock/tasks/{part}.yml").is_file()
    play = tmp_path / "play.yml"
    tasks = ANSIBLE / f"roles/gpulock/tasks/{part}.yml"
    text = [{"hosts": "all", "tasks": [{"import_tasks": str(tasks)}], "handlers": []}]
    play.write_text(json.dumps(text))

    run(playbook, "--syntax-check", play)


def test_a_prometheus_server_gets_targets_and_rules_once(
    playbook: list[str], tmp_path: Path
) -> None:
    play = tmp_path / "play.yml"
    given = {
        "gpulock_part": "monitoring",
        "gpulock_targets_file": str(tmp_path / "prometheus/targets.json"),
        "gpulock_rules_folder": str(tmp_path / "prometheus/rules"),
        "gpulock_nodes": ["node1", "node2"],
        "gpulock_prometheus_service": "",
    }
    role = {"role": str(ANSIBLE / "roles/gpulock"), **given}
    play.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "roles": [role]}]))

    run(playbook, play)

    targets = json.loads((tmp_path / "prometheus/targets.json").read_text())
    assert targets == [{"targets": ["node1:9465", "node2:9465"], "labels": {"cluster": "main"}}]
    assert len(list((tmp_path / "prometheus/rules").glob("gpulock-*.yml"))) == 2
    assert "changed=0" in run(playbook, play), "the second time nothing is to be done"
