# SPDX-License-Identifier: Apache-2.0
"""`gpulock simulate DIR`: what is written, and what is never overwritten."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpulock.simulate.node import (
    SimulationError,
    make_device_nodes,
    write_simulated_node,
)


def settings_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("for_scheduler", [False, True])
def test_the_configuration_points_into_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_scheduler: bool
) -> None:
    """For a scheduler only the GPUs are simulated: its jobs' locks are at their usual place."""
    monkeypatch.chdir(tmp_path)
    node = write_simulated_node(Path("n"), "dgx1", for_scheduler=for_scheduler)
    assert node.marker.read_text() == f"gpulock-simulation 1\nuid={os.geteuid()}\n"
    own = {
        "LOCK_DIR": f"{tmp_path}/n/run/gpulock",
        "STATE_DIR": f"{tmp_path}/n/state",
        "EXPORTER_LISTEN": "127.0.0.1:9465",
        "SIMULATION": f"{tmp_path}/n/simulation",
    }
    assert settings_of(node.config) == {
        "DRIVER_ROOT": f"{tmp_path}/n/proc/driver/nvidia",
        "SYS_ROOT": f"{tmp_path}/n/sys",
        "DEV_ROOT": f"{tmp_path}/n/dev",
        "EXPECTED_GPUS": "8",
        **({} if for_scheduler else own),
    }


@pytest.mark.parametrize("umask", [0, 0o077])
def test_modes_are_set_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        node = write_simulated_node(tmp_path / "n", "dgx1")
    finally:
        assert os.umask(before) == umask  # which is the caller's again
    for folder in (node.directory, node.lock_dir, node.state_dir, node.lock_dir.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    for file in (node.config, node.marker, node.lock_dir / "inventory"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    for name in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm"):
        mode = (node.dev_root / name).stat().st_mode
        assert stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o666


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "precious").write_text("x")
    with pytest.raises(SimulationError, match="not empty"):
        write_simulated_node(tmp_path, "dgx1")
    assert [path.name for path in tmp_path.iterdir()] == ["proc"]
    assert (tmp_path / "proc" / "precious").read_text() == "x"


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    os.chown(tmp_path / "n", 65534, 65534)
    with pytest.raises(SimulationError, match="not yours"):
        write_simulated_node(tmp_path / "n", "dgx1")


@pytest.mark.parametrize(
    ("name", "preset", "gpus", "says"),
    [
        ("n", "dgx1", 9, "1 to 8"),
        ("a\nEXPECTED_GPUS=99", "dgx1", None, "control character"),
        ("file", "dgx1", None, "not a folder"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, name: str, preset: str, gpus: int | None, says: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SimulationError, match=says) as caught:
        write_simulated_node(tmp_path / name, preset, gpus)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.root
def test_a_scheduler_gets_device_nodes_of_a_number_that_no_driver_has(tmp_path: Path) -> None:
    node = write_simulated_node(tmp_path / "n", "dgx1", 2, for_scheduler=True)
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n  1 mem\n240 mine\n\nBlock devices:\n241 sd\n")

    make_device_nodes(node, str(devices))

    made = {path.name: path.stat() for path in node.dev_root.iterdir()}
    assert {stat.filemode(info.st_mode) for info in made.values()} == {"crw-rw-rw-"}
    assert {os.major(info.st_rdev) for info in made.values()} == {241}
    assert len({info.st_rdev for info in made.values()}) == len(made) == 5


@pytest.mark.root
@pytest.mark.parametrize("through", ["n", "made/later/n", "link/n"])
def test_hooks_of_root_get_no_folder_below_a_users(tmp_path: Path, through: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "link").symlink_to(tmp_path)
    os.chown(theirs, 65534, 65534)

    with pytest.raises(SimulationError, match="theirs belongs to uid 65534"):
        write_simulated_node(theirs / through, "dgx1", 2, for_scheduler=True)

    assert [path.name for path in theirs.iterdir()] == ["link"]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_hooks_of_root_get_no_folder_below_one_that_others_may_write(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SimulationError, match="writable by others"):
        write_simulated_node(shared / "n", "dgx1", 2, for_scheduler=True)
    assert not list(shared.iterdir())
    (tmp_path / "way").symlink_to(shared / "own")
    (shared / "own").mkdir()
    with pytest.raises(SimulationError, match="writable by others"):
        write_simulated_node(tmp_path / "way", "dgx1", 2, for_scheduler=True)
    assert not list((shared / "own").iterdir())

    shared.chmod(0o1777)  # others may add there, and replace nothing
    node = write_simulated_node(shared / "n", "dgx1", 2, for_scheduler=True)
    assert stat.S_IMODE(node.directory.stat().st_mode) == 0o755
