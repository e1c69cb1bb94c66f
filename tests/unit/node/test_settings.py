# SPDX-License-Identifier: Apache-2.0
"""The settings file: a line that is not understood is never obeyed in part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.setting_keys import KEYS, SEAMS
from gpulock.node.settings import Settings, parse_settings
from gpulock.node.settings_file import read_settings
from tests.support.faults import plant_fifo, plant_folder, plant_link

MOST_KEYS = 42
ROOT = Path(__file__).resolve().parents[3]
GOOD = "gpulock-simulation 1\n"


def write(tmp_path: Path, text: str, mode: int = 0o644) -> str:
    path = tmp_path / "gpulock.conf"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def refusal(path: str, uid: int | None = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_settings(path, uid)
    assert caught.value.kind == UNKNOWN
    return caught.value


def test_a_number_of_seconds_that_is_too_small_is_told_the_bound_that_it_missed() -> None:
    with pytest.raises(ValueError, match="must be more than 0 and at most 10,000,000 seconds"):
        parse_settings("SLURM_WAIT=0\n", "x")
    with pytest.raises(ValueError, match="must be 0, or more than 0 and at most 10,000,000"):
        parse_settings("IDLE_KILL=-1\n", "x")


def test_every_key_is_an_attribute_and_every_attribute_a_key() -> None:
    names = [name for name, _, _, _ in KEYS + SEAMS]
    assert len(set(names)) == len(names)
    others = {"path", "copy_path", "given", "faults", "ignored", "sge_kinds"}
    others |= {"exporter_dir", "max_sample_age", "process_period", "mps_dir"}
    assert {name.lower() for name in names} | others == set(Settings.__annotations__)
    assert all(meaning for _, _, _, meaning in KEYS + SEAMS)


def test_in_a_user_namespace_the_file_is_not_to_blame() -> None:
    """Who made a user namespace of its own sees root's file as nobody's."""
    path = "/etc/passwd"  # root's
    code = f"from gpulock.node.settings_file import read_settings; read_settings({path!r})"
    other = () if os.geteuid() else ("setpriv", "--reuid", "1001", "--regid", "1001")
    groups = ("--clear-groups",) if other else ()
    alone = (*other, *groups, "unshare", "--user", "--map-root-user", sys.executable, "-c", code)
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"{path}: nobody can say whose it is in this user namespace"), last


def test_in_a_simulation_its_users_processes_are_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert Settings({}).root_uid() == 0
    assert Settings({"SIMULATION": "/marker"}).root_uid() == 1234


def test_a_site_has_few_settings() -> None:
    assert len(KEYS) <= MOST_KEYS


@pytest.mark.parametrize(
    ("period", "age", "lists"), [("0.05", 2, 0.5), ("1", 10, 10), ("15", 150, 10)]
)
def test_how_long_a_sample_counts_follows_from_the_sample_period(
    period: str, age: float, lists: float
) -> None:
    found = parse_settings(f"SAMPLE_PERIOD={period}\n", "f")
    assert (found.max_sample_age, found.process_period) == (age, lists)


@pytest.mark.parametrize(
    "value", ["a=", "a=h100", "a=model:", "a=mig:3x", "a=mig:big.1", "=share", "a=any a"]
)
def test_a_complex_of_no_kind_is_refused_with_its_line(value: str) -> None:
    with pytest.raises(ValueError, match=r"^f:1: SGE_COMPLEXES must "):
        parse_settings(f"SGE_COMPLEXES={value}\n", "f")


@pytest.mark.parametrize(
    "line",
    [
        "LOCK_DIR=run/gpulock",
        "LOCK_DIR=",
        "LOCK_DIR=/",
        "STATE_DIR=/",
        "SAMPLE_PERIOD=0.0000001",
        "SAMPLE_PERIOD=0.04",
        "EXPECTED_GPUS=-1",
        "EXPECTED_GPUS=8.0",
        "EXPECTED_GPUS=²",
        "EXPECTED_GPUS=" + "9" * 5000,
        "SLURM_WAIT=0",
        "SLURM_WAIT=-1",
        "SLURM_WAIT=nan",
        "SLURM_WAIT=inf",
        "SLURM_WAIT=1e9",
        "SLURM_WAIT=",
        "HIDE_UNREQUESTED=true",
        "HIDE_UNREQUESTED=",
        "VISIBLE_DEVICES=both",
        "ON_BUSY=",
        "lock_dir=/x",
        "NO SUCH KEY=1",
        "=1",
        "no equals sign",
        "EXPECTED_GPUS=1",  # the second time
        "STATE_DIR=/var/lib/gpulock # kept",
        "STATE_DIR='/var/lib/gpulock' # kept",
        "STATE_DIR='/var/lib/gpulock' # 'kept'",
        "STATE_DIR=/var/lib/gpulock\t# kept",
        "SGE_CELL= # kept",
        "ALLOWED_PROCESSES=a b # kept",
        "STATE_DIR=/var/lib/gpulock\0",
        "CDI_DIR='/run/\0'",
        "SGE_CELL=a\tb",
        "SGE_CELL=a\rb",
        "SGE_CELL=a\x0cb",
        "SGE_CELL=a\x1bb",
        "SGE_CELL=a\u2028b",
        "SGE_CELL=a\u00a0b",
        "SHARES=0:4\0",
    ],
)
def test_a_line_that_is_wrong_is_named_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f"# first\n\nEXPECTED_GPUS=4\n{line}\nON_BUSY=error\n")
    assert f"{path}:4:" in refusal(path).why


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("SGE_CELL='a b'", "a b"),
        ('SGE_CELL="a"', "a"),
        ("SGE_CELL='a", "'a"),
        ("SGE_CELL='\"a\"'", '"a"'),
        ("SGE_CELL='", "'"),
        ("  SGE_CELL = a  ", "a"),
        ("SGE_CELL=a=b", "a=b"),
        ("SGE_CELL=$(id)", "$(id)"),
        ("SGE_CELL='a # b'", "a # b"),
        ("SGE_CELL=a#b", "a#b"),
        ("SGE_CELL=#b", "#b"),
        ("SGE_CELL=a \r", "a"),
        ("SGE_CELL=", ""),
        ('SGE_CELL=""', ""),
    ],
)
def test_one_pair_of_quotes_goes_and_nothing_is_evaluated(line: str, value: str) -> None:
    assert parse_settings(line, "f").sge_cell == value


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "EXPECTED_GPUS=4\n")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        refusal(path)
        assert read_settings(path, 12345).expected_gpus == 4
    else:
        assert read_settings(path).expected_gpus == 4
        refusal(path, os.geteuid() + 1)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpulock.conf", 0o600)
    refusal(str(tmp_path / "gpulock.conf"))


def test_nothing_in_the_environment_configures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, _, _, _ in KEYS + SEAMS:
        monkeypatch.setenv(name, "/evil")
        monkeypatch.setenv(f"GPULOCK_{name}", "/evil")
    assert read_settings(write(tmp_path, "EXPECTED_GPUS=4\n")).lock_dir == "/run/gpulock"


def simulation(tmp_path: Path) -> tuple[str, Path]:
    marker = tmp_path / "marker"
    marker.write_text(GOOD)
    return write(tmp_path, f"SIMULATION={marker}\n"), marker


@pytest.mark.parametrize(
    "spoil",
    [
        lambda marker: marker.write_text(""),
        lambda marker: marker.write_text("gpulock-simulation 2\n"),
        lambda marker: marker.write_text(f"x\n{GOOD}"),
        lambda marker: marker.write_text("x" * 100_000),
        *(plant_link, plant_fifo, plant_folder, Path.unlink),
    ],
)
def test_a_marker_that_is_no_file_or_says_something_else_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path, marker = simulation(tmp_path)
    spoil(marker)
    refusal(path)


def test_a_marker_of_somebody_else_is_refused_by_root_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = simulation(tmp_path)
    uid = os.geteuid()
    os.chmod(path, 0o600)
    real = os.stat

    def of_root(name: str) -> os.stat_result:
        info = list(real(name))
        info[4] = 0
        return os.stat_result(info)

    monkeypatch.setattr(os, "stat", of_root)
    assert read_settings(path, uid).simulation
    refusal(path, uid + 1)


@pytest.mark.parametrize(
    ("line", "mask", "fault"),
    [
        ("", "uuid", ""),
        ("SHARE_USERS=many", "index", "SHARE_USERS=one: MPS serves one user a card"),
        ("ISOLATION=cgroup", "uuid", "ISOLATION=off: through the MPS its user opens every GPU"),
        ("SLURM_SHARDS=share", "index", "SLURM_SHARDS=refuse: shards have no MPS"),
    ],
)
def test_mps_serves_one_user_a_card_by_uuid_and_none_that_is_isolated(
    line: str, mask: str, fault: str
) -> None:
    found = parse_settings(f"SHARES=0:4\nSHARE_MPS=yes\n{line}\n", "conf")
    assert (found.share_mps, found.visible_devices) == (not fault, mask)
    assert found.faults == ((f"conf: SHARE_MPS=yes needs {fault}",) if fault else ())
    given = parse_settings(f"SHARE_MPS=yes\nVISIBLE_DEVICES=index\n{line}\n", "conf")
    refused = [one.partition(" needs ")[0] for one in given.faults]
    assert ("conf: VISIBLE_DEVICES=index" in refused) == (mask == "uuid")
