# SPDX-License-Identifier: Apache-2.0
"""`--docker`: Docker takes the names by which a job's GPUs are called, and keeps its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulock.install import docker, planner, undo
from gpulock.install.change import FilePlace, InstallRecord
from gpulock.install.docker import enable_cdi, takes_cdi_names
from gpulock.install.hooks import InstallError
from gpulock.install.planner import InstallPlan, NodePlanner
from gpulock.install.undo import transfer_shared_hooks

OWN = '{"log-driver": "journald", "features": {"buildkit": true}}'


def test_what_stands_in_daemon_json_stays() -> None:
    text = enable_cdi(OWN, "/var/run/cdi")
    assert list(json.loads(text).items()) == [
        ("log-driver", "journald"),
        ("features", {"buildkit": True, "cdi": True}),
    ]
    assert enable_cdi(text, "/var/run/cdi/") == text


def test_a_folder_in_which_docker_does_not_look_is_named() -> None:
    found = json.loads(enable_cdi(None, "/srv/cdi"))
    assert found == {
        "features": {"cdi": True},
        "cdi-spec-dirs": ["/etc/cdi", "/var/run/cdi", "/srv/cdi"],
    }
    only = '{"cdi-spec-dirs": ["/etc/cdi"], "features": {"cdi": true}}'
    assert json.loads(enable_cdi(only, "/var/run/cdi"))["cdi-spec-dirs"] == [
        "/etc/cdi",
        "/var/run/cdi",
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"features": []}', '{"cdi-spec-dirs": "/etc/cdi"}', "1"]
)
def test_what_docker_would_not_read_is_not_written_over(text: str) -> None:
    with pytest.raises(InstallError, match=r"daemon\.json"):
        enable_cdi(text, "/var/run/cdi")


def test_a_release_of_its_own_accord() -> None:
    assert not takes_cdi_names(None, (28, 1))
    assert takes_cdi_names(None, (28, 2))
    assert takes_cdi_names("", (29, 0))
    assert not takes_cdi_names(None, None)
    assert not takes_cdi_names('{"features": {"cdi": false}}', (29, 0))


@pytest.fixture
def dockerd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where Docker's daemon is looked for; its daemon.json is below tmp_path as well."""
    program = tmp_path / "dockerd"
    for module in (planner, undo):
        monkeypatch.setattr(module, "DAEMON_JSON", tmp_path / "docker/daemon.json")
    monkeypatch.setattr(docker, "DOCKERD", (str(program),))
    return program


def say(program: Path, release: str) -> None:
    program.write_text(f"#!/bin/sh\necho Docker version {release}, build 1\n")
    program.chmod(0o755)


def plan(folder: Path, asked: bool, conf: str = "") -> InstallPlan:
    config = folder / "gpulock.conf"
    if not config.exists():
        config.write_text(f"STATE_DIR={folder}/state\n{conf}")
    made = NodePlanner(config, "slurm")
    keys = made.cdi_keys(asked)
    if keys:
        made.add_settings(keys)
    made.add_docker(asked)
    return made.plan_


def test_it_is_offered_done_where_asked_and_kept(tmp_path: Path, dockerd: Path) -> None:
    nothing = plan(tmp_path, False)
    assert (nothing.notes, nothing.changes) == ([], [])
    with pytest.raises(InstallError, match="no dockerd"):
        plan(tmp_path, True)
    say(dockerd, "26.1.5")
    assert "--docker" in "".join(plan(tmp_path, False).notes)
    made = plan(tmp_path, True)
    made.apply(lambda _: None)
    assert "restarted" in "".join(made.notes)
    path = tmp_path / "docker/daemon.json"
    assert json.loads(path.read_text()) == {"features": {"cdi": True}}
    assert "CDI_DIR=/var/run/cdi\n" in (tmp_path / "gpulock.conf").read_text()
    for asked in (True, False):
        again = plan(tmp_path, asked)
        assert (again.changes, again.notes) == ([], [])
    path.write_text("{}")
    assert [change.what for change in plan(tmp_path, False).changes] == [f"file {path}"]


def test_a_newer_docker_needs_the_folder_alone(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    made = plan(tmp_path, True)
    assert [change.what for change in made.changes] == [f"file {tmp_path}/gpulock.conf"]
    assert made.notes == []


def test_no_folder_of_the_sites_own_is_passed_over(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    with pytest.raises(InstallError, match="CDI_DIR="):
        plan(tmp_path, True, "CDI_DIR=\n")
    (tmp_path / "gpulock.conf").unlink()
    plan(tmp_path, True, "CDI_DIR=/srv/cdi\n").apply(lambda _: None)
    found = json.loads((tmp_path / "docker/daemon.json").read_text())
    assert "/srv/cdi" in found["cdi-spec-dirs"]


def test_it_stays_as_long_as_one_scheduler_is_installed(tmp_path: Path, dockerd: Path) -> None:
    place = FilePlace(tmp_path / "docker/daemon.json").address
    giver, taker = [InstallRecord(tmp_path / name) for name in ("slurm.json", "sge.json")]
    giver.save({place: (None, "{}")})
    taker.save({("queue", "gpu.q", "prolog"): ("a", "b")})
    assert transfer_shared_hooks(giver, taker)
    assert (giver.load(), place in taker.load()) == ({}, True)
