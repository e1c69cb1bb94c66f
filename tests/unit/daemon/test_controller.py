# SPDX-License-Identifier: Apache-2.0
"""A slurmctld that does not answer is not asked again and again with the gate held."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.daemon.rounds import AGAIN, BackoffControl, ControllerSilence, Rounds
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.slurm import scontrol
from tests.support.clock import VirtualClock
from tests.support.journal import HeardJournal
from tests.support.slurm_site import INVALID, ROOT, SILENT
from tests.support.slurm_site import Site as SlurmSite
from tests.support.trees import Box

NO_CONTACT = "Unable to contact slurm controller"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer take as long as this machine needs."""
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 20.0)


class Site:
    """A node with a squeue that counts how often it was started."""

    def __init__(self, root: Path, clock: VirtualClock) -> None:
        self.root = root
        self.clock = clock
        self.box = Box(root / "node", SLURM_BINARIES=str(root))
        self.calls = root / "calls"
        self.squeue = root / "squeue"
        self.silence = ControllerSilence()

    def answer(self, text: str, after: str = ":") -> None:
        lines = ["#!/bin/sh", f"echo >> {self.calls}", after, f"echo '{text}'", "exit 1", ""]
        self.squeue.write_text("\n".join(lines))
        self.squeue.chmod(0o755)

    def ask(self) -> dict[str, str] | None:
        """Ask as a round does: with a control of its own."""
        return BackoffControl(self.box.node().settings, self.silence).job("12")

    def asked(self) -> int:
        return self.calls.read_text().count("\n") if self.calls.exists() else 0


@pytest.fixture
def site(tmp_path: Path, clock: VirtualClock) -> Site:
    return Site(tmp_path, clock)


def test_after_a_minute_it_is_asked_again_and_its_answer_counts(
    site: Site, clock: VirtualClock
) -> None:
    site.answer(NO_CONTACT)
    for minute in range(3):
        for _ in range(2):
            with pytest.raises(Refusal):
                site.ask()
            clock.now += AGAIN / 2
        assert site.asked() == 1 + minute
    site.answer("slurm_load_jobs error: Invalid job id specified")
    assert [site.ask(), site.ask()] == [None, None]


def test_gpulockd_frees_in_the_round_in_which_slurmctld_is_back(
    tmp_path: Path, clock: VirtualClock
) -> None:
    slurm = SlurmSite(tmp_path)
    slurm.process(60, "slurmd", uid=ROOT)
    slurm.prolog(12, "0")
    slurm.fails(SILENT)
    made = Rounds(DaemonNode(Settings(dict(slurm.settings))), HeardJournal(), ())
    for _ in range(3):
        made.run_round(clock.now)
    assert [call[0] for call in slurm.calls()] == ["squeue"]
    slurm.fails(INVALID)
    clock.now += AGAIN
    report = made.run_round(clock.now)
    assert report is not None
    assert [outcome.act for outcome in report.outcomes] == ["freed"]
    made.close()


def test_an_odd_answer_about_one_job_keeps_nobody_from_asking_about_another(
    site: Site, clock: VirtualClock
) -> None:
    site.squeue.write_text(
        f'#!/bin/sh\necho >> {site.calls}\n[ "$5" = 12 ] && exit 0\necho "{INVALID}"\nexit 1\n'
    )
    site.squeue.chmod(0o755)
    for _ in range(3):
        asking = BackoffControl(site.box.node().settings, site.silence)
        for _ in range(2):
            with pytest.raises(Refusal):
                asking.job("12")
            assert asking.job("13") is None
        assert clock.now >= site.silence.until
