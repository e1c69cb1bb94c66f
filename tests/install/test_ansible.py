# SPDX-License-Identifier: Apache-2.0
"""The Ansible role is one that Ansible understands, and its part for a Prometheus server works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "docs/examples/ansible"
INSTALLERS = {"ansible.builtin.apt": "deb", "ansible.builtin.dnf": "name"}


@pytest.fixture(scope="module")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command `ansible-playbook`, of an environment of its own."""
    venv = tmp_path_factory.mktemp("ansible")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "install", "-q", "ansible-core"], check=True)
    python = f"ansible_python_interpreter={sys.executable}"
    local = ["-i", "localhost,", "-c", "local", "-e", python]
    return [str(venv / "bin/ansible-playbook"), *local]


def run(playbook: list[str], *words: str | Path) -> str:
    """Run it in the folder of the role; return what it said."""
    command = [*playbook, *map(str, words)]
    done = subprocess.run(command, cwd=ANSIBLE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def watch_installers(tasks: list[dict[str, Any]], seen: Path) -> list[dict[str, Any]]:
    """Return the tasks; in place of an installer is a look at its file and each folder above."""
    changed: list[dict[str, Any]] = []
    for task in tasks:
        named = next(((name, key) for name, key in INSTALLERS.items() if name in task), None)
        if named:
            look = (
                f"path={task[named[0]][named[1]]}; test -f $path || exit 1; "
                f'while [ "$path" != / ]; do stat -c "%u %a %n" "$path" >>{seen}; '
                'path=$(dirname "$path"); done'
            )
            changed.append({"name": task["name"], "ansible.builtin.shell": look})
        else:
            parts = {key: watch_installers(task[key], seen) for key in ("block",) if key in task}
            changed.append({**task, **parts})
    return changed


@pytest.mark.root
def test_no_user_could_have_made_or_can_write_the_file_that_root_installs(
    playbook: list[str], tmp_path: Path
) -> None:
    tasks = yaml.safe_load((ANSIBLE / "roles/gpulock/tasks/node.yml").read_text())
    given = yaml.safe_load((ANSIBLE / "roles/gpulock/defaults/main.yml").read_text())
    package, seen, play = tmp_path / "gpulock_1_all.deb", tmp_path / "seen", tmp_path / "play.yml"
    package.write_bytes(b"the package")
    until = next(n for n, task in enumerate(tasks) if task["name"] == "Set the settings")
    watched = watch_installers(tasks[:until], seen)
    given |= {"gpulock_package": str(package)}
    text = {"hosts": "all", "gather_facts": False, "vars": given, "tasks": watched}
    play.write_text(json.dumps([text]))

    run(playbook, play)

    looks = [line.split(None, 2) for line in seen.read_text().splitlines()]
    files = [path for _, _, path in looks if path.endswith(package.name)]
    assert len(files) == len(INSTALLERS)
    for uid, mode, path in looks:
        assert uid == "0", path
        assert not int(mode, 8) & 0o022, f"{path} has mode {mode}: users may make names there"
    assert not Path(files[0]).exists(), "it goes when it is installed"
    assert not Path(files[0]).parent.exists()


def test_each_part_is_understood_and_a_prometheus_server_gets_targets_and_rules_once(
    playbook: list[str], tmp_path: Path
) -> None:
    run(playbook, "--syntax-check", "site.yml")
    play = tmp_path / "play.yml"
    for part in ("node", "controller", "monitoring"):
        tasks = str(ANSIBLE / f"roles/gpulock/tasks/{part}.yml")
        text = [{"hosts": "all", "tasks": [{"import_tasks": tasks}], "handlers": []}]
        play.write_text(json.dumps(text))
        run(playbook, "--syntax-check", play)
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
