# SPDX-License-Identifier: Apache-2.0
"""A card that the driver lists and NVML does not answer for: from the driver to the next claim.

The worker's source looks at the double of NVML, the exporter's state makes a sample of that, and
gpulockd's round and a claim read it. One clock, which the test turns, drives all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpulock_exporter.app.exporter import Exporter
from gpulock_exporter.frame import Frame
from gpulock_exporter.state.snapshot import Moment
from gpulock_exporter.worker.supervisor import Supervisor

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.daemon.core.sample import read_sample
from gpulock.daemon.health.checker import CardChecker
from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.main_loop import Rounds
from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.store.quarantine import QUARANTINE, list_noted_devices, read_suspect_cards
from tests.nvml.double import ERROR_UNKNOWN, Double
from tests.support.claims import never
from tests.support.exporter_nvml import STOPPED_AT, Eye
from tests.support.journal import HeardJournal
from tests.support.trees import record, soon

pytestmark = pytest.mark.slow

HOUR, ROUND = 3600.0, 30.0
SOON = 5  # seconds until a lost card is suspect
BUSES = ("0000:06:00.0", "0000:07:00.0", "0000:0a:00.0", "0000:0b:00.0")


class Site:
    """A simulated node with an exporter that was up for an hour, and a gpulockd."""

    def __init__(self, nvml: Double, eye: Eye) -> None:
        self.nvml, self.eye = nvml, eye
        self.jobs = 0
        self.seconds = STOPPED_AT
        self.settings = read_settings(str(nvml.node / "gpulock.conf"))
        self.node = Node(self.settings)
        self.journal = HeardJournal()
        self.supervisor = Supervisor(["/nonexistent"], lambda: self.seconds)
        self.exporter = self.start_exporter()
        checker = CardChecker(self.journal, lambda: self.seconds)
        policy = HealthPolicy(self.journal, lambda: self.seconds)
        self.rounds = Rounds(DaemonNode(self.settings), self.journal, [checker, policy])
        self.tick()
        self.round()
        self.tick(after=HOUR)
        self.round()
        self.drivers = nvml.node / "proc/driver/nvidia/gpus"

    def now(self) -> Moment:
        """Return the moment of the one clock."""
        return Moment(self.seconds, 1.7e9 + self.seconds)

    def start_exporter(self) -> Exporter:
        """Start an exporter, which goes on from what an earlier one left."""
        if hasattr(self, "exporter"):
            self.exporter.folder.release()
        self.exporter = Exporter(self.node, self.now, str)
        self.exporter.open()
        return self.exporter

    def tick(self, *, after: float = 1.0, frames: bool = True) -> Frame | None:
        """Let a second pass for worker, exporter and gpulockd."""
        self.seconds += after
        frame = self.eye.look(after=after)
        self.exporter.tick([frame] if frames else [], self.supervisor)
        if self.seconds >= self.rounds.due:
            self.rounds.run_due(self.seconds)
        return frame

    def round(self) -> None:
        """Let gpulockd reconcile."""
        assert self.rounds.run_round(self.seconds) is not None, self.journal.said()

    def pass_rounds(self, times: int) -> None:
        """Let so many regular rounds of gpulockd come, the exporter looking each second."""
        for _ in range(times):
            for _ in range(int(ROUND)):
                self.tick()
            self.round()

    def suspects(self) -> set[str]:
        """Return the cards that a claim takes last."""
        return set(read_suspect_cards(self.settings.state_dir, self.node.boot_id))

    def out(self) -> list[str]:
        """Return what is out of service."""
        return list_noted_devices(self.settings.state_dir, QUARANTINE)

    def lost(self) -> dict[str, str]:
        """Return why each card is lost, by what the exporter tells."""
        told = read_sample(self.settings.exporter_dir, self.seconds, self.node.boot_id)
        assert told is not None
        return {bus: why for bus, (_, why) in told.lost.items()}

    def claim(self) -> str:
        """Let one more job have one card; return which one it got."""
        self.jobs += 1
        own = record(
            token="",
            devices=(),
            boot_id=self.node.boot_id,
            node=self.node.name,
            job_id=str(self.jobs),
        )
        (device,) = claim_devices(self.node, own, ClaimRequest(1), never, soon()).devices
        return device.id


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=4) as nvml, Eye(nvml, stopped=True) as eye:
        yield Site(nvml, eye)


def lose(site: Site, manner: str) -> None:
    """Let the first card be lost."""
    if manner == "not counted":  # the rest is renumbered
        site.nvml.set("gpu0.gone", 1)
    elif manner == "unknown error":
        site.nvml.fail("*", ERROR_UNKNOWN, gpu=0)
    else:
        site.nvml.lose(0)


MANNERS = ("handle", "not counted", "unknown error")


@pytest.mark.parametrize("restarted", [False, True], ids=["", "worker restarted"])
@pytest.mark.parametrize("manner", MANNERS)
def test_a_lost_card_is_suspect_within_seconds_and_no_job_gets_it_first(
    site: Site, manner: str, restarted: bool
) -> None:
    assert (site.suspects(), site.lost()) == (set(), {})
    lose(site, manner)
    if restarted:
        site.eye.close()
        site.eye.open()
    for _ in range(SOON):
        site.tick()
    assert site.suspects() == {BUSES[0]}
    for _ in range(200):  # also once NVML was initialised again, and the card has no handle
        site.tick()
        assert list(site.lost()) == [BUSES[0]]
    assert site.suspects() == {BUSES[0]}
    assert [site.claim() for _ in BUSES] == [*BUSES[1:], BUSES[0]]


def test_a_lost_card_stays_lost_while_the_driver_does_not_answer_and_over_a_restart(
    site: Site,
) -> None:
    site.nvml.lose(0)
    site.tick()
    before = site.lost()
    for _ in range(30):
        site.tick(frames=False)
    assert site.lost() == before
    site.start_exporter()
    for _ in range(SOON):
        site.tick(frames=False)
    assert (site.lost(), site.suspects()) == (before, {BUSES[0]})
    site.nvml.reset()
    site.tick()
    assert site.lost() == {}
    site.pass_rounds(1)
    assert site.suspects() == set()


def test_a_card_that_is_pulled_on_purpose_is_missing_and_not_lost(site: Site) -> None:
    site.nvml.set("gpu0.gone", 1)
    shutil.rmtree(site.drivers / BUSES[0])
    for _ in range(10):
        site.tick()  # before the exporter reads the driver's list again, and after
    assert site.suspects() == set()
    site.pass_rounds(1)
    assert (site.lost(), site.suspects()) == ({}, set())


def test_an_exporter_that_starts_or_sees_no_card_at_all_makes_none_suspect(site: Site) -> None:
    site.start_exporter()
    site.tick(frames=False)
    assert site.lost() == {}
    site.nvml.set("devices", 0)  # the driver is being loaded anew
    for _ in range(20):
        site.tick()
        assert (site.lost(), site.suspects()) == ({}, set())
    for _ in range(40):
        site.tick(frames=False)
    site.round()
    assert (site.lost(), site.suspects()) == ({}, set())
