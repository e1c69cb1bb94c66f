# SPDX-License-Identifier: Apache-2.0
"""A slurmctld that does not answer is not asked again and again with the gate held."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon import control
from gpulock.daemon.control import FIRST, LONGEST, Silence, SparingControl
from gpulock.refusal import UNKNOWN, Refusal
from tests.unit.trees import Box


class Clock:
    """The time, as a test says it is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(control, "boottime", made)
    return made


class Site:
    """A node with a squeue that counts how often it was started."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root / "node", SLURM_BINARIES=str(root), SLURM_TIMEOUT="20")
        self.calls = root / "calls"
        self.squeue = root / "squeue"
        self.silence = Silence()

    def answer(self, text: str, code: int = 1) -> None:
        self.squeue.write_text(f"#!/bin/sh\necho >> {self.calls}\necho '{text}'\nexit {code}\n")
        self.squeue.chmod(0o755)

    def ask(self) -> dict[str, str] | None:
        """Ask as a round does: with a control of its own."""
        return SparingControl(self.box.node().settings, self.silence).job("12")

    def asked(self) -> int:
        return self.calls.read_text().count("\n") if self.calls.exists() else 0


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_it_answers_is_returned_each_time(site: Site, clock: Clock) -> None:
    site.answer("slurm_load_jobs error: Invalid job id specified")
    assert [site.ask(), site.ask()] == [None, None]
    assert site.asked() == 2


def test_after_silence_it_is_left_alone_for_a_while(site: Site, clock: Clock) -> None:
    site.answer("Unable to contact slurm controller")
    for _ in range(3):
        with pytest.raises(Refusal) as caught:
            site.ask()
        assert caught.value.kind == UNKNOWN
    assert site.asked() == 1
    clock.now += FIRST
    with pytest.raises(Refusal):
        site.ask()
    assert site.asked() == 2


def test_an_answer_ends_the_silence(site: Site, clock: Clock) -> None:
    site.answer("Unable to contact slurm controller")
    with pytest.raises(Refusal):
        site.ask()
    clock.now += FIRST
    site.answer("slurm_load_jobs error: Invalid job id specified")
    assert [site.ask(), site.ask()] == [None, None]
    assert site.asked() == 3


def test_the_longer_it_is_silent_the_longer_it_is_left_alone() -> None:
    silence = Silence()
    pauses: list[float] = []
    now = 0.0
    for _ in range(6):
        silence.begins(now)
        begun = now
        while silence.lasts(now):
            now += FIRST
        pauses.append(now - begun)
    assert pauses == [60, 120, 240, 480, LONGEST, LONGEST]
