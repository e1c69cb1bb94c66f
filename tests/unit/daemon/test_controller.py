# SPDX-License-Identifier: Apache-2.0
"""A slurmctld that does not answer is not asked again and again with the gate held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.core import controller
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.controller import AGAIN, LONGEST, BackoffControl, ControllerBackoff
from gpulock.daemon.reconcile.driver import DaemonNode
from gpulock.daemon.rounds import Rounds
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.settings import Settings
from gpulock.slurm import scontrol
from gpulock.slurm.scontrol import SlurmctldSilentError
from tests.support.clock import VirtualClock, boot_time
from tests.support.journal import HeardJournal
from tests.support.slurm_site import INVALID, ROOT, SILENT
from tests.support.slurm_site import Site as SlurmSite
from tests.support.trees import Box

NO_CONTACT = "Unable to contact slurm controller"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a round wait for a thread as long as this machine needs."""
    monkeypatch.setattr(controller, "PATIENCE", 20.0)
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 20.0)


class Site:
    """A node with a squeue that counts how often it was started."""

    def __init__(self, root: Path, clock: VirtualClock) -> None:
        self.root = root
        self.clock = clock
        self.box = Box(root / "node", SLURM_BINARIES=str(root))
        self.calls = root / "calls"
        self.squeue = root / "squeue"
        self.silence = ControllerBackoff()

    def answer(self, text: str, after: str = ":") -> None:
        lines = ["#!/bin/sh", f"echo >> {self.calls}", after, f"echo '{text}'", "exit 1", ""]
        self.squeue.write_text("\n".join(lines))
        self.squeue.chmod(0o755)

    def ask(self) -> dict[str, str] | None:
        """Ask as a round does: with a control of its own."""
        return BackoffControl(self.box.node().settings, self.silence).job("12")

    def listen(self) -> None:
        """Do what a round does before it takes the gate."""
        if self.clock() < self.silence.until:
            self.silence.probe(self.box.node().settings, self.clock())

    def asked(self) -> int:
        return self.calls.read_text().count("\n") if self.calls.exists() else 0


@pytest.fixture
def site(tmp_path: Path, clock: VirtualClock) -> Site:
    return Site(tmp_path, clock)


def test_what_it_answers_is_returned_each_time(site: Site, clock: VirtualClock) -> None:
    site.answer("slurm_load_jobs error: Invalid job id specified")
    assert [site.ask(), site.ask()] == [None, None]
    assert site.asked() == 2


def test_after_silence_it_is_left_alone(site: Site, clock: VirtualClock) -> None:
    site.answer(NO_CONTACT)
    for _ in range(3):
        with pytest.raises(Refusal) as caught:
            site.ask()
        assert caught.value.kind == UNKNOWN
    assert site.asked() == 1


def test_before_the_gate_it_is_asked_again_now_and_then_and_nothing_ends_without_an_answer(
    site: Site, clock: VirtualClock
) -> None:
    site.answer(NO_CONTACT)
    for minute in range(30):  # three times as long as it is left alone where nobody listens
        with pytest.raises(Refusal):
            site.ask()
        for _ in range(2):
            site.listen()
            clock.now += AGAIN / 2
        assert site.asked() == 1 + minute
    assert clock.now < site.silence.until


def test_an_answer_ends_the_silence_and_work_goes_on_in_the_same_round(
    site: Site, clock: VirtualClock
) -> None:
    site.answer(NO_CONTACT)
    with pytest.raises(Refusal):
        site.ask()
    site.answer("slurm_load_jobs error: Invalid job id specified")
    site.listen()
    with pytest.raises(Refusal):
        site.ask()
    clock.now += AGAIN
    site.listen()
    assert [site.ask(), site.ask()] == [None, None]
    assert site.asked() == 4


@pytest.mark.real_time
def test_an_answer_that_takes_its_time_is_taken_by_a_later_round(
    site: Site, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now = boot_time()  # for the virtual clock, who sleeps at the gate would be late at once
    site.answer(NO_CONTACT)
    with pytest.raises(Refusal):
        site.ask()
    go = site.root / "go"
    os.mkfifo(go)
    site.answer("slurm_load_jobs error: Invalid job id specified", after=f"read _ <{go}")
    monkeypatch.setattr(controller, "PATIENCE", 0.0)
    clock.now += AGAIN
    for _ in range(3):
        site.listen()
        assert clock.now < site.silence.until
        clock.now += AGAIN
    go.write_text("go\n")
    monkeypatch.setattr(controller, "PATIENCE", 20.0)
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 20.0)
    site.listen()
    assert clock.now >= site.silence.until
    assert site.asked() == 2


def test_a_question_that_never_comes_back_leaves_the_way_through_the_gate(
    site: Site, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.answer(NO_CONTACT)
    with pytest.raises(Refusal):
        site.ask()

    def hangs(*_: object) -> bool:
        return False

    monkeypatch.setattr(BackgroundCall, "wait", hangs)
    site.answer("slurm_load_jobs error: Invalid job id specified")
    for _ in range(int(LONGEST / AGAIN)):
        site.listen()
        assert clock.now < site.silence.until
        clock.now += AGAIN
    site.listen()
    assert site.ask() is None


def test_one_that_answers_is_not_asked_beside_the_gate(site: Site, clock: VirtualClock) -> None:
    site.answer("slurm_load_jobs error: Invalid job id specified")
    site.ask()
    clock.now += AGAIN
    site.listen()
    assert site.asked() == 1


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


def test_an_odd_answer_ends_a_silence(site: Site, clock: VirtualClock) -> None:
    site.answer(NO_CONTACT)
    with pytest.raises(Refusal):
        site.ask()
    site.squeue.write_text("#!/bin/sh\nexit 0\n")
    clock.now += AGAIN
    site.listen()
    assert clock.now >= site.silence.until


class Hanging:
    """A question that is not answered in the round that puts it, but fails by the next one."""

    put = 0

    def __init__(self, question: object) -> None:
        type(self).put += 1
        self._looks = 0

    def wait(self, seconds: float) -> bool:
        self._looks += 1
        return self._looks > 1

    def answer(self) -> None:
        raise SlurmctldSilentError("squeue did not answer in time")


def test_one_that_hangs_is_asked_every_minute_all_the_same(
    site: Site, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "BackgroundCall", Hanging)
    monkeypatch.setattr(Hanging, "put", 0)
    site.silence.start(clock.now, "12")
    for _ in range(20):
        clock.now += AGAIN / 2
        site.listen()
    assert Hanging.put == 10
