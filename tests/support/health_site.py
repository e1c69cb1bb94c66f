# SPDX-License-Identifier: Apache-2.0
"""A node whose health is watched: real folders, a clock that a test turns, a written sample."""

from __future__ import annotations

import time
from pathlib import Path

from gpulock.daemon.core.sample import SAMPLE_LINE
from gpulock.daemon.health.cards import NodeCards, read_cards, save_cards
from gpulock.daemon.health.checker import CardChecker
from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.reconcile.reconcile import Chore, DaemonNode, reconcile_locks
from gpulock.deadline import clock_boottime
from gpulock.node.settings import Settings
from gpulock.store import quarantine
from gpulock.store.owner import Owner
from gpulock.store.quarantine import QUARANTINE
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.trees import BOOT, NAME, Box, bus, judge_of, record, soon

GIB = 1 << 30
ROUND = 30.0  # seconds between two rounds
SHEPHERD = 5_000_000  # no process of this machine has such a number, not pytest either


class Ward(Box):
    """A node with an exporter's folder and the chore; `now` is CLOCK_BOOTTIME seconds."""

    def __init__(self, root: Path, gpus: int = 4, **keys: str) -> None:
        self.exporter = root / "run-exporter"
        self.exporter.mkdir()
        defaults = {"QUARANTINE_ON": "xid ecc missing health"}
        super().__init__(root, gpus, **{**defaults, **keys})
        # whole seconds: the sum of two rounds is then two rounds, with no rounding
        self.now: float = clock_boottime() // 1
        self.boot = BOOT
        self.facts: dict[int, str] = {}
        self.lost: dict[int, str] = {}  # why a GPU does not answer
        self.records_logged = 0
        self.journal = HeardJournal()
        self.start()

    def start(self) -> None:
        """Restart gpulockd."""
        self.health = HealthPolicy(self.journal, lambda: self.now)
        self.checker = CardChecker(self.journal, lambda: self.now)

    def tell(self, number: int, *pairs: str) -> None:
        """Let the exporter tell this of a GPU from now on."""
        self.facts[number] = " ".join(pairs)

    def log_xid(self, number: int, xid: int = 79) -> None:
        """Let the driver log an XID of a GPU; the exporter tells that the GPU is there."""
        self.facts.setdefault(number, "")
        self.log_kernel(f"NVRM: Xid (PCI:{bus(number)[:-2]}): {xid}, pid=4711, name=python")

    def log_kernel(self, text: str, facility: int = 0) -> None:
        """Let the kernel's log have one more record."""
        with (self.dev / "kmsg").open("a") as log:
            log.write(f"{8 * facility + 3},{self.records_logged},{self.now * 1e6:.0f},-;{text}\n")
        self.records_logged += 1

    def lose(self, number: int, why: str = "GPU is lost") -> None:
        """Let the driver list a GPU and not answer for it: its values stay what they were."""
        self.lost[number] = why
        self.facts[number] = f"looked={self.now} {self.facts.get(number, '')}"

    def sample(self, *lines: str, ago: float = 0.0) -> None:
        """Let the exporter write how things stand."""
        at = self.now - ago
        head = [SAMPLE_LINE, f"boot_id={self.boot}", f"boottime={at}", f"looked={at}"]
        cards = [
            " ".join([f"device {bus(n)}", *told(at, facts)]) for n, facts in self.facts.items()
        ]
        lost = [f"lost {bus(n)} {at} {why}" for n, why in self.lost.items()]
        (self.exporter / "sample").write_text("\n".join([*head, *cards, *lost, *lines]) + "\n")

    def round(self, times: int = 1, *, sampled: bool = True, tests: bool = True) -> None:
        """Let so many rounds pass, each with a fresh sample; without `tests` of no card."""
        for _ in range(times):
            self.now += ROUND
            if sampled:
                self.sample()
            node = self.node()
            report = reconcile_locks(node, judge_of(node), soon())
            for chore in self.chores() if tests else (self.health,):
                chore.run(node, report, self.now)

    def node(self) -> DaemonNode:
        return DaemonNode(Settings(dict(self.settings)), NAME)

    def chores(self) -> tuple[Chore, ...]:
        """Return what a round does, in gpulockd's order."""
        return (self.health, self.checker)

    def cards(self) -> NodeCards:
        """Return what gpulockd knows of the cards."""
        return read_cards(str(self.state), self.boot)

    def save(self, cards: NodeCards) -> None:
        """Let gpulockd know this of the cards."""
        assert save_cards(str(self.state), cards)

    def note_command(self, number: int, found: str, tested: float = float("inf")) -> None:
        """Let HEALTH_COMMAND have ended on a GPU, with what it `found` against it."""
        cards = self.cards()
        cards.of(bus(number)).note_command(found, min(tested, self.now + 3600))
        self.save(cards)

    def suspects(self) -> dict[str, str]:
        """Return what claims take last, and why."""
        return quarantine.read_suspect_cards(str(self.state), self.boot)

    def reboot(self) -> None:
        """Boot the machine: LOCK_DIR is empty, and the exporter counts from nothing."""
        self.boot = "22222222-2222-2222-2222-222222222222"
        self.proc.boot(self.boot)
        for number in self.facts:
            self.facts[number] = ""
        (self.dev / "kmsg").write_text("")
        self.records_logged = 0
        self.start()

    def reload(self) -> None:
        """Load the driver anew."""
        self.now += 1.0
        self.log_kernel("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06")

    def hold(self, number: int) -> Owner:
        """Let a living job hold a GPU."""
        self.proc.execd(self.root)
        self.proc.shepherd(SHEPHERD, self.root)
        own = record(
            pid=SHEPHERD, devices=(bus(number),), claimed_at=time.time(), minors=(str(number),)
        )
        place_lock(self.node().store, bus(number), own)
        return own

    def out(self) -> list[str]:
        """Return what is out of service."""
        return quarantine.list_noted_devices(str(self.state), QUARANTINE)

    def reason(self, number: int) -> str:
        """Return why a GPU is out of service."""
        return quarantine.read_device_note(str(self.state), QUARANTINE, bus(number))["reason"]

    def by_hand(self, number: int, reason: str = "its fan died") -> None:
        """Let an administrator take a GPU out."""
        quarantine.write_device_note(str(self.state), QUARANTINE, bus(number), "root", reason)

    def restored(self, number: int) -> None:
        """Let an administrator bring a GPU back."""
        quarantine.remove_device_note(str(self.state), QUARANTINE, bus(number))

    def said(self) -> list[str]:
        return self.journal.said()


def told(at: float, facts: str) -> list[str]:
    """Return the sample of a device: that nothing is on it, unless `facts` say otherwise."""
    pairs = {"looked": str(at), "memory_used": "0", "processes": "0"}
    pairs.update({key: value for key, _, value in (word.partition("=") for word in facts.split())})
    return [f"{key}={value}" for key, value in pairs.items()]
