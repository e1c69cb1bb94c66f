# SPDX-License-Identifier: Apache-2.0
"""What an installation says of a gpulockd that does not run, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.cli.admin import items
from gpulock.cli.session import Session
from gpulock.daemon.core.instance_lock import InstanceLock
from gpulock.install.systemd import manager

LOCK_DIR = "LOCK_DIR={}/run\nSTATE_DIR={}/state\n"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Return the session of a node whose gpulockd does not run."""
    config = tmp_path / "gpulock.conf"
    config.write_text(LOCK_DIR.format(tmp_path, tmp_path))
    (tmp_path / "run").mkdir()
    return Session(str(config))


def told(session: Session, capsys: pytest.CaptureFixture[str]) -> list[str]:
    items.note_missing_daemon(session)
    return capsys.readouterr().out.splitlines()


def test_services_are_named_as_missing_only_while_no_daemon_runs(
    session: Session,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "RUNNING", tmp_path / "none")
    assert told(session, capsys) == [f"note: {items.NO_SYSTEMD}"]
    monkeypatch.setattr(manager, "RUNNING", tmp_path)
    assert told(session, capsys) == [f"note: {items.NO_DAEMON}"]

    running = InstanceLock()
    running.take(str(tmp_path / "run"))
    assert told(session, capsys) == []
    running.release()
