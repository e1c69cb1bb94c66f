# SPDX-License-Identifier: Apache-2.0
"""The job's environment file: our lines once, the user's others untouched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN
from gpulock.job import environment
from gpulock.sge import environment_file
from tests.support.faults import refusal
from tests.support.jobs import Site

DROP = environment.grant_variable_names(("SGE_GPU",))
PAIRS = [("CUDA_VISIBLE_DEVICES", "2,3"), ("SGE_GPU", "2,3")]


def change(text: str, binds: str = "") -> list[str]:
    changed = environment_file.rewrite_env_text(text, PAIRS, DROP, binds)
    assert changed.endswith("\n") and "\n\n" not in changed
    return changed.splitlines()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("A=1\nCUDA_VISIBLE_DEVICES=0\nB=2", ["A=1", "B=2"]),
        ("CUDA_VISIBLE_DEVICES_OLD=0\n", ["CUDA_VISIBLE_DEVICES_OLD=0"]),
        ("A=CUDA_VISIBLE_DEVICES=0\n", ["A=CUDA_VISIBLE_DEVICES=0"]),
        ("=CUDA_VISIBLE_DEVICES=0\n", []),  # the shepherd reads these two as ours
        ("==CUDA_VISIBLE_DEVICES=0\n", []),
        (
            "APPTAINER_BINDPATH=/a\nAPPTAINER_BINDPATH=/b\n",
            ["APPTAINER_BINDPATH=/a", "APPTAINER_BINDPATH=/b"],
        ),
    ],
)
def test_our_lines_stand_once_behind_the_users(text: str, kept: list[str]) -> None:
    assert change(text) == [*kept, "CUDA_VISIBLE_DEVICES=2,3", "SGE_GPU=2,3"]


@pytest.mark.parametrize("name", sorted(DROP))
def test_none_of_the_users_own_masks_survives(name: str) -> None:
    lines = change(f"{name}=0\nA=1\n{name}=1\n{name}\n")
    assert [line for line in lines if line.startswith(name)] == [
        f"{key}={value}" for key, value in PAIRS if key == name
    ]


@pytest.mark.parametrize("value", ["a\nb", "\n", "a\n"])
def test_a_newline_never_gets_into_a_variable(value: str) -> None:
    with pytest.raises(ValueError):
        environment_file.rewrite_env_text("", [("A", value)], DROP, "")
    with pytest.raises(ValueError):
        environment_file.rewrite_env_text("", [], DROP, value)


def test_the_bind_lists_are_appended_to_once_however_often_the_hook_runs() -> None:
    lines = change("APPTAINER_BINDPATH=/scratch\nA=1\n", "/d/bin:/nvbin")
    assert "APPTAINER_BINDPATH=/scratch,/d/bin:/nvbin" in lines
    assert "SINGULARITY_BINDPATH=/d/bin:/nvbin" in lines
    once = "\n".join(lines) + "\n"
    twice = "\n".join(change(once, "/d/bin:/nvbin")) + "\n"
    assert once == twice
    assert once.count("APPTAINER_BINDPATH=") == 1


STALE = (
    "CUDA_MPS_PIPE_DIRECTORY=/mps/0000-8a-00.0/pipe\n"
    "CUDA_MPS_LOG_DIRECTORY=/mps/0000-8a-00.0/log\n"
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\n"
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8000M\n"
)
STALE_TWINS = "".join(f"APPTAINERENV_{line}\n" for line in STALE.splitlines())
USERS = STALE.replace("/mps/", "/tmp/mine/")


def test_what_another_grants_mps_needs_is_dropped_and_a_users_own_mps_stands() -> None:
    def left(text: str) -> list[str]:
        return environment_file.rewrite_env_text(text, [], DROP, "", "/mps").splitlines()

    assert left(f"A=1\n{STALE}{STALE_TWINS}B=/mps/x\n") == ["A=1", "B=/mps/x"]
    assert left(USERS) == USERS.splitlines()
    assert left(f"{STALE_TWINS}{USERS}") == USERS.splitlines()
    limits = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"
    assert left(f"{limits}\nC=/mps/x\n") == [limits, "C=/mps/x"]
    mine = ["CUDA_MPS_PIPE_DIRECTORY=/mps-of-mine/pipe", "C=/mps/x"]
    assert left("\n".join(mine)) == mine


def test_a_line_too_long_for_the_shepherd_cannot_become_two() -> None:
    mask = "CUDA_VISIBLE_DEVICES=0"
    long = "A=" + "x" * (environment_file.LONGEST_VARIABLE - 2) + mask
    assert change(long)[0] == long[: environment_file.LONGEST_VARIABLE]
    assert len(change("B=" + "é" * 10_000)[0].encode("utf-8", "surrogateescape")) == 9998


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.run()
    return made


def write(site: Site) -> None:
    environment_file.write_sge_env_file(site.above(), PAIRS, DROP, "", "/mps")


def refused(site: Site, kind: str) -> None:
    assert refusal(lambda: write(site)).kind == kind


def path_of(site: Site) -> Path:
    return Path(site.above().path, "environment")


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o640])
def test_the_mode_is_kept(site: Site, mode: int) -> None:
    path = path_of(site)
    path.chmod(mode)
    before = path.stat()
    write(site)
    after = path.stat()
    assert stat.S_IMODE(after.st_mode) == mode
    assert after.st_ino != before.st_ino


@pytest.mark.root
def test_the_owner_is_kept_when_root_replaces_the_file(site: Site) -> None:
    path = path_of(site)
    folder = path.parent
    site.proc.add(500, "sge_shepherd", uids=(0, 104, 104, 104), cwd=folder)
    os.chown(folder, 104, 107)
    os.chown(path, 104, 107)
    write(site)
    assert (path.stat().st_uid, path.stat().st_gid) == (104, 107)


@pytest.mark.root
def test_a_file_that_belongs_to_a_user_is_refused(site: Site) -> None:
    os.chown(path_of(site), 12345, 12345)
    refused(site, BROKEN)


def test_a_link_in_its_place_is_not_followed(site: Site) -> None:
    path = path_of(site)
    path.rename(path.with_name("real"))
    refused(site, UNKNOWN)
    path.symlink_to("real")
    before = path.read_bytes()
    refused(site, BROKEN)
    assert path.read_bytes() == before
    path.with_name("real").unlink()
    refused(site, BROKEN)


def test_bytes_that_are_no_text_are_kept(site: Site) -> None:
    path = path_of(site)
    path.write_bytes(b"A=\xff\xfe\x00\nCUDA_VISIBLE_DEVICES=\xff\n")
    write(site)
    assert path.read_bytes() == b"A=\xff\xfe\x00\nCUDA_VISIBLE_DEVICES=2,3\nSGE_GPU=2,3\n"
