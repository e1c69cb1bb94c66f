# SPDX-License-Identifier: Apache-2.0
"""What MPS says by its log, pid file and answers is its user's word, who may say anything."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from gpulock.daemon.mps import processes
from gpulock.daemon.mps.folder import PID_FILE, MpsError, read_control_log, read_daemon_pid
from gpulock.daemon.mps.processes import MpsSite, ask_daemon
from gpulock.job.mps import LOGS, PIPES
from tests.support.trees import Box


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the log's place in the folder of a card."""
    (tmp_path / LOGS).mkdir()
    return tmp_path / LOGS / "control.log"


def test_the_last_line_of_a_users_log_is_shown_short_and_without_control_characters(
    log: Path,
) -> None:
    log.write_text(f"one\n{'x' * 500}\x1b[2J it ended\n\n")
    said = read_control_log(str(log.parents[1]))
    assert said.endswith("x?[2J it ended")
    assert len(said) == 200


@pytest.mark.timeout(20)
def test_a_fifo_a_link_or_a_log_without_end_is_no_log(log: Path, tmp_path: Path) -> None:
    os.mkfifo(log)
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    (tmp_path / "secret").write_text("root's\n")
    log.symlink_to(tmp_path / "secret")
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    with log.open("wb") as file:
        file.truncate(1 << 33)
    assert read_control_log(str(tmp_path)) == ""
    log.unlink()
    log.parent.rmdir()
    log.parent.symlink_to(tmp_path)
    (tmp_path / log.name).write_text("root's\n")
    assert read_control_log(str(tmp_path)) == ""


@pytest.mark.timeout(20)
def test_a_pid_file_of_anything_names_no_process(tmp_path: Path) -> None:
    (tmp_path / PIPES).mkdir()
    file = tmp_path / PIPES / PID_FILE
    for text in (b"", b"\xff", b"9" * 5000, b"7 8", b"0x7", b"nan", b"\0"):
        file.write_bytes(text)
        assert read_daemon_pid(str(tmp_path)) == [], text
    file.unlink()
    os.mkfifo(file)
    assert read_daemon_pid(str(tmp_path)) == []


@pytest.mark.timeout(60)
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("cat >&2; yes 7 | head -c 9000", "7\n" * 2048),
        ("printf '\\377\\033[2J'", "\ufffd\x1b[2J"),
        ("sleep 1000 & exit 0", ""),  # who has the pipe keeps nobody waiting
        ("exec yes", None),
        ("kill -STOP $$", None),
        ("exit 3", None),
        ("kill -KILL $$", None),
    ],
)
def test_an_answer_is_short_and_in_time_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, answer: str | None
) -> None:
    monkeypatch.setattr(processes, "ASK_SECONDS", 5.0 if answer is not None else 0.5)
    (script := tmp_path / "control").write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    box = Box(tmp_path, 1)
    box.settings["MPS_CONTROL"] = str(script)
    node = box.node()
    asked = ask_daemon(MpsSite(node, node.devices()[0], os.geteuid()), "get_server_list\n")
    try:
        while True:
            select.select([], [], [], next(asked))
    except StopIteration as end:
        assert end.value == answer
    except MpsError:
        assert answer is None
