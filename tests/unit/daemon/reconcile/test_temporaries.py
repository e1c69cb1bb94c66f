# SPDX-License-Identifier: Apache-2.0
"""What a killed process left half written goes, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.daemon.reconcile.temporaries import TemporaryRemover
from gpulock.store import atomic
from tests.support.trees import Box, judge_of, soon

PLACES = (
    *("run", "run.claims", "run.claims/tasks", "run/refused", "state", "state/owed"),
    *("state/quarantine", "state/history", "cdi"),
)


def clean_up(box: Box, blind: str = "") -> None:
    """Reconcile, then let the chore look."""
    node = box.node()
    judge = judge_of(node)
    judge.scan.blind = blind
    report = reconcile_locks(node, judge, soon())
    TemporaryRemover().run(node, report, 0.0)


def killed_while_writing(path: Path) -> None:
    """Let a process be killed between the writing of a file and its rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:

        def die(*_: object, **__: object) -> None:
            os._exit(9)

        os.rename = die
        atomic.replace_file(str(path), b"half")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def folders(tmp_path: Path) -> Box:
    """Return a node that has a folder for everything."""
    box = Box(tmp_path, CDI_DIR=str(tmp_path / "cdi"))
    clean_up(box)
    return box


@pytest.mark.parametrize("place", PLACES)
def test_what_killed_processes_left_half_written_is_removed(tmp_path: Path, place: str) -> None:
    box = folders(tmp_path)
    killed_while_writing(tmp_path / place / "feed")
    left = [name for name in os.listdir(tmp_path / place) if name.startswith(".feed.")]
    assert len(left) == 1
    clean_up(box)
    assert not (tmp_path / place / left[0]).exists()


@pytest.mark.parametrize("place", PLACES)
def test_what_a_living_process_is_writing_stays_and_so_does_what_has_another_name(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own rename comes to its end, whatever reconciles at that moment."""
    box = folders(tmp_path)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    others = [".feed", ".feed.0f0f", ".feed.x.0123456789ab", "a.7.0123456789ab", ".7.0123456789ab"]
    for name in others:
        (tmp_path / place / name).touch()
    box.proc.add(os.getpid())
    real = os.rename

    def rename(*words: Any, **about: Any) -> None:
        monkeypatch.undo()
        clean_up(box)
        real(*words, **about)

    monkeypatch.setattr(os, "rename", rename)
    atomic.replace_file(str(tmp_path / place / "feed"), b"whole")
    assert (tmp_path / place / "feed").read_text() == "whole"
    assert {*others} <= {*os.listdir(tmp_path / place)}


def test_where_processes_cannot_be_seen_nothing_half_written_is_removed(box: Box) -> None:
    killed_while_writing(box.lock / "verdicts")
    clean_up(box, "hidden")
    assert [name for name in os.listdir(box.lock) if name.startswith(".verdicts.")]
