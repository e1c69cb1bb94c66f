# SPDX-License-Identifier: Apache-2.0
"""`--docker`: Docker takes the names by which a job's GPUs are called, and keeps its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulock.install import docker, planner
from gpulock.install.docker import CDI, Release, plan_docker, takes_cdi_names
from gpulock.install.hooks import InstallError
from gpulock.install.planner import InstallPlan, NodePlanner
from tests.support.install_site import SgeFiles

OWN = '{\n  "log-driver": "journald",\n  "features": {\n    "buildkit": true\n  }\n}\n'


def changed(
    path: Path, folder: str = "/var/run/cdi", release: Release | None = (26, 1)
) -> list[str]:
    """Make the changes to a daemon.json; return the keys."""
    changes = plan_docker(path, release, folder)
    for change in changes:
        change.apply()
    return [str(change.place.address[2]) for change in changes]


def test_all_else_in_daemon_json_stays(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(OWN)
    path.chmod(0o600)
    assert changed(path) == [CDI]
    assert path.read_text() == OWN.replace("true", 'true,\n    "cdi": true')
    assert path.stat().st_mode & 0o777 == 0o600
    assert changed(path) == []


@pytest.mark.parametrize(
    ("text", "release", "folder", "taken"),
    [
        ("", (28, 1), "/var/run/cdi", False),
        ("", (28, 2), "/var/run/cdi", True),
        ("", (29, 0), "/run/cdi/", True),
        ("", (29, 0), "/srv/cdi", False),
        ("", None, "/etc/cdi", False),
        ('{"features": {"cdi": true}}', None, "/etc/cdi", True),
        ('{"features": {"cdi": true}}', (20, 10), "/etc/cdi", False),
        ('{"features": {"cdi": false}}', (29, 0), "/etc/cdi", False),
        ('{"features": null}', (29, 0), "/etc/cdi", True),
        ('\ufeff{"features": {"cdi": true}}', (26, 1), "/etc/cdi", True),
        ('{"cdi-spec-dirs": ["/etc/cdi"]}', (29, 0), "/var/run/cdi", False),
        ('{"cdi-spec-dirs": ["/run/cdi"]}', (29, 0), "/var/run/cdi", True),
        ('{"cdi-spec-dirs": [""]}', (29, 0), "/etc/cdi", False),
    ],
)
def test_docker_takes_the_names_of_a_folder(
    tmp_path: Path, text: str, release: Release | None, folder: str, taken: bool
) -> None:
    assert takes_cdi_names(text, release, folder) is taken
    if release is not None and release >= (25, 0):
        path = tmp_path / "daemon.json"
        path.write_text(text)
        assert bool(changed(path, folder, release)) is not taken
        assert takes_cdi_names(path.read_text(), release, folder)


@pytest.mark.parametrize("release", [None, (20, 10), (24, 0)])
def test_a_docker_that_would_not_start_with_it_is_left_alone(
    tmp_path: Path, release: Release | None
) -> None:
    with pytest.raises(InstallError, match=r"25\.0"):
        plan_docker(tmp_path / "daemon.json", release, "/etc/cdi")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"features": []}', '{"cdi-spec-dirs": "/etc/cdi"}', "1"]
)
def test_what_docker_would_not_read_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(text)
    with pytest.raises(InstallError, match=r"daemon\.json"):
        plan_docker(path, (26, 1), "/var/run/cdi")
    assert path.read_text() == text


@pytest.fixture
def dockerd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where Docker's daemon is looked for; its daemon.json is below tmp_path as well."""
    program = tmp_path / "dockerd"
    monkeypatch.setattr(planner, "DAEMON_JSON", tmp_path / "docker/daemon.json")
    monkeypatch.setattr(docker, "DOCKERD", (str(program),))
    return program


def say(program: Path, release: str) -> None:
    program.write_text(f"#!/bin/sh\necho Docker version {release}, build 1\n")
    program.chmod(0o755)


def plan(folder: Path, asked: bool, conf: str = "") -> InstallPlan:
    config = folder / "gpulock.conf"
    if not config.exists():
        config.write_text(f"STATE_DIR={folder}/state\n{conf}")
    made = NodePlanner(config, "sge")
    keys = made.cdi_keys(asked)
    if keys:
        made.add_settings(keys)
    made.add_docker(asked)
    return made.plan_


def test_it_is_offered_and_done_where_asked(tmp_path: Path, dockerd: Path) -> None:
    nothing = plan(tmp_path, False)
    assert (nothing.notes, nothing.changes) == ([], [])
    with pytest.raises(InstallError, match="no dockerd"):
        plan(tmp_path, True)
    say(dockerd, "26.1.5")
    assert "--docker" in "".join(plan(tmp_path, False).notes)
    made = plan(tmp_path, True)
    made.apply(lambda _: None)
    assert "restarted" in "".join(made.notes)
    assert "gpulock cdi --write" in "".join(made.notes)
    path = tmp_path / "docker/daemon.json"
    assert json.loads(path.read_text()) == {"features": {"cdi": True}}
    assert "CDI_DIR=/var/run/cdi\n" in (tmp_path / "gpulock.conf").read_text()
    for asked in (True, False):
        again = plan(tmp_path, asked)
        assert (again.changes, again.notes) == ([], [])
    dockerd.unlink()
    assert plan(tmp_path, False).changes == []


def test_a_newer_docker_needs_the_folder_alone(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    made = plan(tmp_path, True)
    assert [change.what for change in made.changes] == [f"file {tmp_path}/gpulock.conf"]
    assert "restarted" not in "".join(made.notes)


def test_no_folder_of_the_sites_own_is_passed_over(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    with pytest.raises(InstallError, match="CDI_DIR="):
        plan(tmp_path, True, "CDI_DIR=\n")
    (tmp_path / "gpulock.conf").unlink()
    plan(tmp_path, True, "CDI_DIR=/srv/cdi\n").apply(lambda _: None)
    found = json.loads((tmp_path / "docker/daemon.json").read_text())
    assert "/srv/cdi" in found["cdi-spec-dirs"]


def test_uninstalling_writes_nothing_into_dockers_file_and_names_the_key(
    tmp_path: Path, dockerd: Path
) -> None:
    """The keys were taken out again, also where the site has come to need them."""
    say(dockerd, "26.1.5")
    plan(tmp_path, True).apply(lambda _: None)
    path = tmp_path / "docker/daemon.json"
    path.write_text('{"data-root": "/srv/docker", "features": {"cdi": true, "x": 1}}')
    before, said = path.read_text(), list[str]()

    assert SgeFiles(tmp_path / "gpulock.conf", said.append).uninstall() == []

    assert path.read_text() == before
    assert f"{path} keeps features.cdi: true; take it out where nothing needs it" in said


def test_a_key_that_the_site_has_changed_is_not_named(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "26.1.5")
    plan(tmp_path, True).apply(lambda _: None)
    (tmp_path / "docker/daemon.json").write_text('{"features": {"cdi": false}}')
    said: list[str] = []

    assert SgeFiles(tmp_path / "gpulock.conf", said.append).uninstall() == []

    assert "daemon.json" not in "".join(said)
