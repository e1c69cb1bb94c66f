# SPDX-License-Identifier: Apache-2.0
"""gpulockd has the map of Slurm's positions compared when gres.conf or the cards changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots import slurm_map
from gpulock.daemon.slots.slurm_map import AGAIN, EVERY, SlurmMapRenewal
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.settings import Settings
from tests.support.faults import raising
from tests.support.journal import HeardJournal
from tests.support.slurm_site import Site

RENEW_MAP = slurm_map.renew_map


class Compared:
    """A node with a gres.conf, the chore, and what was asked of the program."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.site = Site(root)
        self.conf = root / "gres.conf"
        self.conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n")
        self.journal = HeardJournal()
        self.chore = SlurmMapRenewal(self.journal)
        self.asked: list[bool] = []
        self.fault = ""
        self.now = 100.0
        self.map()
        patch.setattr(slurm_map, "renew_map", self.renew)

    def map(self, *places: str) -> None:
        self.site.map(*(places or ("0", "1", "2", "3")), gres_conf=str(self.conf))

    def renew(self, _: Settings, ask: bool) -> str:
        """Be the program."""
        self.asked.append(ask)
        if self.fault:
            raise Refusal(UNKNOWN, self.fault, "restart slurmd")
        self.map()
        return "4 positions"

    def round(self) -> None:
        """Do a round of gpulockd, and wait for what it began."""
        node = self.site.node()
        self.chore.run(node, ReconcileReport([], [], devices=node.devices()), self.now)
        self.wait()

    def wait(self) -> None:
        if self.chore.asking:
            assert self.chore.asking.wait(20)

    def later(self, seconds: float = EVERY) -> list[bool]:
        """Let time pass; return what was asked since."""
        self.asked.clear()
        self.now += seconds
        for _ in range(2):
            self.chore.run_due(self.now)
            self.wait()
        return self.asked


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(tmp_path, monkeypatch)


def test_a_map_that_is_in_step_starts_no_program(compared: Compared) -> None:
    compared.round()
    assert compared.later() == compared.later() == []
    assert compared.chore.due == compared.now + EVERY


def test_a_changed_gres_conf_is_compared_within_seconds(compared: Compared) -> None:
    compared.round()
    with compared.conf.open("a") as file:
        file.write("# a comment\n")
    assert compared.later() == [False]
    assert compared.later() == []
    assert compared.journal.said() == ["<5>slurm-map: 4 positions"]


def test_slurmd_is_asked_when_the_cards_or_slurm_conf_changed(compared: Compared) -> None:
    compared.round()
    compared.conf.with_name("slurm.conf").write_text("NodeName=n1 Gres=gpu:a:4\n")
    assert compared.later() == [True]
    assert compared.later() == []
    compared.site.gpu("0000:f0:00.0", 9)
    compared.round()
    assert compared.asked == [True]
    assert compared.later() == []


def test_slurmd_is_asked_where_the_map_is_of_other_cards_than_were_found_at_the_start(
    compared: Compared,
) -> None:
    compared.map("0", "1", "2", "7")
    compared.round()
    assert compared.asked == [True]


def test_a_comparison_that_fails_is_tried_again_and_told_once(compared: Compared) -> None:
    compared.round()
    compared.fault = "slurmd has another list"
    with compared.conf.open("a") as file:
        file.write("Name=gpu File=/dev/nvidia4\n")
    assert compared.later() == [False]
    assert compared.later() == []
    assert compared.later(AGAIN) == [False]
    compared.later()
    said = [line for line in compared.journal.said() if "not renewed" in line]
    assert said == ["<4>slurm-map is not renewed: slurmd has another list; restart slurmd"]
    compared.fault = ""
    assert compared.later(AGAIN) == [False]
    compared.later()
    assert "no longer" in compared.journal.said()[-1]


def test_a_map_that_is_made_while_gpulockd_runs_is_compared_within_seconds(
    compared: Compared,
) -> None:
    """As by `gpulock install slurm`: gres.conf gets its lines after that, and slurmd starts."""
    (compared.site.state / "slurm-map").unlink()
    compared.round()
    assert (compared.later(), compared.chore.asking) == ([], None), "without one nothing is asked"
    compared.map()
    compared.conf.write_text("Name=gpu File=/dev/nvidia[0-3] Flags=no_gpu_env\n")
    assert compared.chore.due <= compared.now + EVERY
    assert compared.later() == [False]


def test_a_comparison_that_cannot_be_started_is_told_and_tried_again(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared.round()
    compared.conf.write_text("Name=gpu File=/dev/nvidia[0-2]\n")
    with monkeypatch.context() as patch:
        patch.setattr(slurm_map, "renew_map", RENEW_MAP)
        patch.setattr(os, "pipe", raising(OSError(errno.EMFILE, "Too many open files")))
        compared.later()
        assert "Too many open files" in compared.journal.said()[0]
    assert compared.later() == []
    assert compared.later(AGAIN) == [False]


def test_the_program_tells_why_it_could_not(tmp_path: Path) -> None:
    config = tmp_path / "gpulock.conf"
    config.write_text(f"STATE_DIR={tmp_path}\n")
    settings = Settings({"STATE_DIR": str(tmp_path)}, str(config))
    with pytest.raises(Refusal) as refused:
        slurm_map.renew_map(settings, ask=True)
    assert refused.value.kind == UNKNOWN
    assert "slurm" in refused.value.why


def test_a_long_reason_of_the_program_is_told_from_its_begin(tmp_path: Path) -> None:
    config = tmp_path / ("long" * 50) / "gpulock.conf"
    config.parent.mkdir()
    config.write_text("nonsense\n")
    with pytest.raises(Refusal) as refused:
        slurm_map.renew_map(Settings({}, str(config)), ask=True)
    assert refused.value.why.startswith(f"settings: {config}:1: not KEY=VALUE")
