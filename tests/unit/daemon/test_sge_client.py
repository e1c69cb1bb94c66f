# SPDX-License-Identifier: Apache-2.0
"""gpulockd asks qmaster by the site's own clients, in time or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.core.sge_client import ask_qmaster, sge_environment
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.settings import Settings
from tests.support.scripts import write_script


def write_client(folder: Path, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_script(folder / "qconf", body)


def settings_of(root: Path) -> Settings:
    return Settings({"SGE_BINARIES": str(root), "SGE_ROOT": "/opt/sge", "SGE_CELL": "cell"})


def test_a_client_gets_its_words_and_an_environment_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGE_QMASTER_PORT", "1")
    monkeypatch.setenv("LD_PRELOAD_X", "evil")
    write_client(tmp_path, 'printf "[%s]" "$@"; env')
    words, *lines = ask_qmaster(settings_of(tmp_path), "qconf", "-se", "a b").split("\n")
    assert words.startswith("[-se][a b]")
    told = [words.rpartition("]")[2], *lines]
    names = {line.partition("=")[0] for line in told if line}
    known = {"PATH", "SGE_ROOT", "SGE_CELL", "SGE_SINGLE_LINE", "TMPDIR"}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == known
    assert "TMPDIR=/run" in told  # which gpulockd's unit may write: qconf -mattr makes a file


def test_one_that_fails_is_not_believed_and_its_last_words_are_the_reason(tmp_path: Path) -> None:
    write_client(tmp_path, "echo complex_values gpu=8; echo denied >&2; exit 1")
    with pytest.raises(Refusal, match=r"qconf -se node1 ended with \d+: .*denied") as caught:
        ask_qmaster(settings_of(tmp_path), "qconf", "-se", "node1")
    assert caught.value.kind == UNKNOWN


def test_without_sge_binaries_the_clients_are_below_sge_root(tmp_path: Path) -> None:
    write_client(tmp_path / "bin/lx-amd64", "echo node1")
    settings = Settings({"SGE_ROOT": str(tmp_path)})
    assert ask_qmaster(settings, "qconf", "-sel") == "node1"


@pytest.mark.parametrize("keys", [{}, {"SGE_ROOT": "/nowhere"}, {"SGE_BINARIES": "HERE"}])
def test_a_program_that_is_missing_or_may_not_be_run_is_none(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    """No program of a distribution stands in for it."""
    write_client(tmp_path, "exit 0")
    (tmp_path / "qconf").chmod(0o644)
    with pytest.raises(Refusal, match="no qconf in "):
        ask_qmaster(
            Settings({k: v.replace("HERE", str(tmp_path)) for k, v in keys.items()}), "qconf"
        )


@pytest.mark.parametrize("value", ["6444;", "", "x;", "1 2;", "123456;", "$(id);", "-1;", "6444"])
def test_the_ports_are_those_of_the_cells_own_settings(tmp_path: Path, value: str) -> None:
    common = tmp_path / "cell/common"
    common.mkdir(parents=True)
    text = f"\0\nSGE_QMASTER_PORT={value} export SGE_QMASTER_PORT\nunset SGE_EXECD_PORT\n"
    (common / "settings.sh").write_bytes(text.encode() + b"\xff")
    found = sge_environment(Settings({"SGE_ROOT": str(tmp_path), "SGE_CELL": "cell"}))
    assert found.get("SGE_QMASTER_PORT", "") == ("6444" if value == "6444;" else "")
    assert "SGE_EXECD_PORT" not in found
