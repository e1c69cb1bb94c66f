# SPDX-License-Identifier: Apache-2.0
"""`--docker`: Docker takes the names by which a job's GPUs are called; its file is the site's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulock.install import container_hooks, docker
from gpulock.install.docker import Release, docker_lines, takes_cdi_names
from gpulock.install.hooks import InstallError
from gpulock.install.node_part import NodePart


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
        lines = docker_lines(text, release, folder)
        assert bool(lines) is not taken
        settings = json.loads(text.removeprefix("\ufeff") or "{}")
        settings.update(json.loads(f"{{{','.join(lines)}}}"))
        assert takes_cdi_names(json.dumps(settings), release, folder)


def test_what_the_site_has_of_a_key_is_in_its_line() -> None:
    text = '{"features": {"buildkit": true}, "cdi-spec-dirs": ["/srv/cdi"]}'

    assert docker_lines(text, (26, 1), "/var/run/cdi") == [
        '"features": {"buildkit": true, "cdi": true}',
        '"cdi-spec-dirs": ["/srv/cdi", "/var/run/cdi"]',
    ]


@pytest.mark.parametrize("release", [None, (20, 10), (24, 0)])
def test_a_docker_that_would_not_start_with_it_is_refused(release: Release | None) -> None:
    with pytest.raises(InstallError, match=r"25\.0"):
        docker_lines(None, release, "/etc/cdi")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"features": []}', '{"cdi-spec-dirs": "/etc/cdi"}', "1"]
)
def test_what_docker_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(InstallError, match=r"daemon\.json"):
        docker_lines(text, (26, 1), "/var/run/cdi")


@pytest.fixture
def dockerd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where Docker's daemon is looked for; its daemon.json is below tmp_path as well."""
    program = tmp_path / "dockerd"
    monkeypatch.setattr(container_hooks, "DAEMON_JSON", tmp_path / "docker/daemon.json")
    monkeypatch.setattr(docker, "DOCKERD", (str(program),))
    return program


def say(program: Path, release: str) -> None:
    program.write_text(f"#!/bin/sh\necho Docker version {release}, build 1\n")
    program.chmod(0o755)


@dataclass
class Planned:
    """What an installation says and would write of Docker."""

    keys: dict[str, str]
    notes: list[str]
    pages: list[list[str]]


def plan(folder: Path, asked: bool, conf: str = "") -> Planned:
    config = folder / "gpulock.conf"
    if not config.exists():
        config.write_text(conf)
    part = NodePart(config, "slurm")
    return Planned(part.cdi_keys(asked), part.notes, container_hooks.docker_pages(part, asked))


def test_it_is_offered_and_the_lines_are_printed_where_asked(tmp_path: Path, dockerd: Path) -> None:
    assert plan(tmp_path, False) == Planned({}, [], [])
    with pytest.raises(InstallError, match="no dockerd"):
        plan(tmp_path, True)
    say(dockerd, "26.1.5")
    assert "--docker" in "".join(plan(tmp_path, False).notes)
    made = plan(tmp_path, True)
    assert "gpulock cdi --write" in "".join(made.notes)
    (page,) = made.pages
    assert '    "features": {"cdi": true}' in page and "restart Docker" in page[-1]
    assert not (tmp_path / "docker").exists(), "the file is the site's"
    assert made.keys == {"CDI_DIR": "/var/run/cdi"}
    (tmp_path / "gpulock.conf").write_text("CDI_DIR=/var/run/cdi\n")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/daemon.json").write_text('{"features": {"cdi": true}}')
    again = plan(tmp_path, True)
    assert (again.notes, again.pages) == ([], [])


def test_a_newer_docker_needs_the_folder_alone(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    made = plan(tmp_path, True)
    assert (made.keys, made.pages) == ({"CDI_DIR": "/var/run/cdi"}, [])


def test_no_folder_of_the_sites_own_is_passed_over(tmp_path: Path, dockerd: Path) -> None:
    say(dockerd, "29.1.3")
    with pytest.raises(InstallError, match="CDI_DIR="):
        plan(tmp_path, True, "CDI_DIR=\n")
    (tmp_path / "gpulock.conf").unlink()
    (page,) = plan(tmp_path, True, "CDI_DIR=/srv/cdi\n").pages
    assert '    "cdi-spec-dirs": ["/etc/cdi", "/var/run/cdi", "/srv/cdi"]' in page
