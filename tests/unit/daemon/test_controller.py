# SPDX-License-Identifier: Apache-2.0
"""A slurmctld that does not answer is not asked again and again with the gate held."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.daemon.rounds import AGAIN, Rounds
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.slurm import scontrol
from tests.support.clock import VirtualClock
from tests.support.journal import HeardJournal
from tests.support.slurm_site import INVALID, ROOT, SILENT
from tests.support.slurm_site import Site as SlurmSite
from tests.support.trees import Box


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer take as long as this machine needs."""
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 20.0)


def test_gpulockd_frees_in_the_round_in_which_slurmctld_is_back(
    tmp_path: Path, clock: VirtualClock
) -> None:
    slurm = SlurmSite(tmp_path)
    slurm.process(60, "slurmd", uid=ROOT)
    slurm.prolog(12, "0")
    slurm.fails(SILENT)
    made = Rounds(DaemonNode(Settings(dict(slurm.settings))), HeardJournal(), ())
    for minute in range(3):
        for _ in range(2):
            made.run_round(clock.now)
            clock.now += AGAIN / 2
        assert [call[0] for call in slurm.calls()] == ["squeue"] * (minute + 1)
    slurm.fails(INVALID)
    report = made.run_round(clock.now)
    assert report is not None
    assert [outcome.act for outcome in report.outcomes] == ["freed"]
    made.close()


def test_an_odd_answer_about_one_job_keeps_nobody_from_asking_about_another(
    tmp_path: Path, clock: VirtualClock
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$5" = 12 ] && exit 0\necho "{INVALID}"\nexit 1\n')
    squeue.chmod(0o755)
    node = DaemonNode(Box(tmp_path / "node", SLURM_BINARIES=str(tmp_path)).node().settings)
    made = Rounds(node, HeardJournal(), ())
    for _ in range(3):
        asking = made.ask_slurmctld()
        for _ in range(2):
            with pytest.raises(Refusal):
                asking.job("12")
            assert asking.job("13") is None
