# SPDX-License-Identifier: Apache-2.0
"""A node whose cards sicken and recover in the world, and whose free cards are tested.

The exporter tells how a card is, gpulockd puts the sick ones out of service and back, and a test
of a free card gives way to the claim that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpulock.daemon.core.journal import WARNING
from gpulock.daemon.core.sample import SAMPLE, SAMPLE_LINE
from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.daemon.health.checker import CardChecker
from gpulock.daemon.health.health_command import (
    CardTakenError,
    is_check_asked_to_end,
    lock_for_check,
    release_check,
)
from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.health.recovery import ADMIN_RESTORE_ONLY, CLEAN_CHECKS
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.main_loop import Rounds
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.errors import BUSY, Refusal
from gpulock.node.context import Node
from gpulock.store import atomic
from gpulock.store.quarantine import QUARANTINE, read_device_notes, read_suspect_cards
from tests.support.trees import bus
from tests.world.accidents import reboot, shepherd_dies
from tests.world.actors import Cast, Play, gpulockd, reap, run_claim, sge_job, slurm_job
from tests.world.kernel import FREEZE, KILL, Violation
from tests.world.processes import Process
from tests.world.site import NAME, USER, Held, QuietJournal, Site, WorldNode

CARDS = 4  # the exporter's word puts out half of them at most
WIDE, NARROW = 16, 8  # lanes
LINK, ACTION = "link", "action"  # how a card is sick: a narrow link, or the driver wants a reset
NOBODY = 65534
TEST = "test of"  # what a test of a card is called among those who hold one
PAUSE = 11.0  # seconds between two rounds of which each is a check that counts
COMEBACKS = CLEAN_CHECKS + 3  # rounds in which all that is well must be back


class ChoresJournal(QuietJournal):
    """gpulockd's journal; `failed` is whether a chore, or a part of health, did at last."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[str, bool] = {}

    @property
    def failed(self) -> bool:
        """Return whether the last round left out what another would have done."""
        return any(self._failed.values())

    def log_changes(self, part: str, found: Mapping[str, str], level: int = WARNING) -> None:
        """Keep whether chores and parts of health failed."""
        if part in ("chores", "parts of health"):
            self._failed[part] = bool(found)
        super().log_changes(part, found, level)


class KnowingRounds(Rounds):
    """gpulockd's rounds; the site learns what a round that is over knew."""

    site: HealthSite

    def run_round(self, now: float) -> ReconcileReport | None:
        """Do one round, a moment after the exporter has looked."""
        sick = dict(self.site.sick)
        if not self.site.silent:
            self.site.write_sample()
        done = super().run_round(now)
        if (
            done is not None and not self.site.journal.failed
        ):  # a policy that the gate shut out knows nothing
            for device in sick.keys() & self.site.sick.keys():
                self.site.known.setdefault(device, self.site.kernel.now)
        return done


class HealthSite(Site):
    """The node. `sick` has how each sick card is, `known` since when gpulockd knows of it.

    While `silent` no exporter runs.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, CARDS, QUARANTINE_ON="xid health")
        Path(f"{self.lock_dir}-exporter").mkdir()

    def reset(self, seed: int, fresh: bool = False) -> None:
        self.sick: dict[str, str] = {}
        self.known: dict[str, float] = {}
        self.silent = False
        super().reset(seed, fresh)
        self.write_sample()

    def write_sample(self) -> None:
        """Let the exporter tell how each card is now."""
        now, wall = self.kernel.now, self.kernel.wall + self.kernel.now
        head = [SAMPLE_LINE, f"boot_id={self.kernel.tree.boot_id}", "sequence=1"]
        lines = [*head, f"boottime={now}", f"wall={wall}"]
        for number in range(CARDS):
            how = self.sick.get(bus(number))
            width = NARROW if how == LINK else WIDE
            words = [f"looked={now} processes=0 memory_used=0 pcie_width={width}"]
            words += [f"pcie_width_max={WIDE}"]
            words += ["recovery_action=1"] if how == ACTION else []
            lines.append(f"device {bus(number)} {' '.join(words)}")
        atomic.replace_file(f"{self.lock_dir}-exporter/{SAMPLE}", "\n".join([*lines, ""]).encode())

    def make_rounds(self) -> Rounds:
        self.journal: ChoresJournal = ChoresJournal()
        history = HistoryWriter(self.journal.said.append)
        chores = (history, HealthPolicy(self.journal), CardChecker(self.journal))
        made = KnowingRounds(WorldNode(self.settings, NAME), self.journal, chores)
        made.site = self
        return made

    def begin(
        self, who: str, token: str, devices: frozenset[str], asks: str = "", uid: int = USER
    ) -> Held:
        """Let a job start, unless it was given what was known to be sick. Raises Violation."""
        for device in () if who.startswith(TEST) else devices & self.known.keys():
            text = Path(f"{self.lock_dir}/locks/{device}/owner").read_text()
            claimed = float(text.partition("\nclaimed_boottime=")[2].partition("\n")[0])
            if claimed > self.known[device]:
                raise Violation(f"{who} gets {device}, known to be sick for some time")
        return super().begin(who, token, devices, asks, uid)

    def boot(self, keeps: bool) -> None:
        super().boot(keeps)
        self.known.clear()  # gpulockd has not looked in this boot
        for name in os.listdir(f"{self.lock_dir}-exporter"):
            os.unlink(f"{self.lock_dir}-exporter/{name}")

    def recover(self, device: str) -> None:
        """Let a card be well again; where its driver wanted a reset it was loaded anew."""
        how = self.sick.pop(device, "")
        self.known.pop(device, None)
        if how == ACTION and os.path.isdir(self.lock_dir):
            cards = read_cards(self.state_dir, self.kernel.tree.boot_id)
            cards.loaded = self.kernel.now
            save_cards(self.state_dir, cards)

    def finish(self) -> None:
        """Let all cards recover: each is back in a few rounds, as any card is. Raises Violation."""
        self.kernel.full = ()
        self.held = [one for one in self.held if not one.who.startswith(TEST)]  # in no history
        for device in list(self.sick):
            self.recover(device)
        self.silent = True  # or the history waits for what the exporter tells of the last claims
        for name in os.listdir(f"{self.lock_dir}-exporter"):
            os.unlink(f"{self.lock_dir}-exporter/{name}")
        super().finish()
        self.silent = False
        rounds = self.make_rounds()
        for _ in range(COMEBACKS):
            self.kernel.now += PAUSE
            rounds.run_round(self.kernel.now)
        rounds.single.release()
        notes = read_device_notes(self.state_dir, QUARANTINE)
        if kept := [name for name, n in notes.items() if ADMIN_RESTORE_ONLY not in n["reason"]]:
            raise Violation(f"{' '.join(kept)} is well, and stays out of service: {notes}")
        if last := read_suspect_cards(self.state_dir, self.kernel.tree.boot_id):
            raise Violation(f"{last} are well, and taken last")


def sickens(number: int, how: str, recovers: bool = True) -> Play:
    """Return a card that falls sick at any time, and may recover later."""
    device = bus(number)

    def play(site: Site) -> None:
        assert isinstance(site, HealthSite)
        kernel = site.kernel
        kernel.step("falls sick", device)
        site.sick[device] = how
        kernel.sleep(0.5)
        if recovers:
            kernel.step("recovers", device)
            site.recover(device)

    return play


def tests_card(number: int, times: int = 1) -> Play:
    """Return gpulockd that tests a free card: the lock is its program's, which it starts first."""
    device = bus(number)

    def play(site: Site) -> None:
        kernel = site.kernel
        for _ in range(times):
            daemon = kernel.tree.spawn("gpulockd")
            program = kernel.tree.spawn("program", ppid=daemon.pid, uids=(NOBODY,) * 4)

            def main(program: Process = program) -> int:
                node = Node(site.settings, NAME)
                try:
                    one = next(found for found in node.devices() if found.id == device)
                    token = lock_for_check(node, one, program.pid, NOBODY)
                except (CardTakenError, Refusal) as refusal:
                    site.log.append(str(refusal))
                    return 1
                mine = site.begin(f"{TEST} {device}", token, frozenset((device,)))
                mine.processes = [program]
                program.fds = {n: str(p) for n, p in site.opened(mine.devices).items()}
                for _ in range(3):
                    if is_check_asked_to_end(node, device, token):
                        break
                    kernel.step("tests", device)
                    site.check()
                kernel.tree.end(program)
                try:
                    release_check(node, token)
                except Refusal as refusal:
                    site.log.append(str(refusal))
                return 0

            kernel.program(daemon, main)
            kernel.tree.end(program)  # with its daemon, by the kernel
            kernel.sleep(1.0)

    return play


def needs_every_card() -> Play:
    """Return a claim of every card of a node on which nobody else works: it is never refused."""
    claim = run_claim(CARDS)

    def play(site: Site) -> None:
        before = len(site.log)
        site.log.append("")
        claim(site)
        if busy := [text for text in site.log[before:] if text.startswith(BUSY)]:
            raise Violation(f"a test keeps cards from a claim: {busy}")

    return play


JOBS = sge_job(11, 2)
HEALTH_CASTS: dict[str, Cast] = {
    "link": Cast(one=JOBS, card=sickens(0, LINK), d=gpulockd(3), two=run_claim(2)),
    "action": Cast(one=JOBS, card=sickens(0, ACTION, False), d=gpulockd(2), two=run_claim(2)),
    "slurm": Cast(
        one=slurm_job(21, 1), card=sickens(0, ACTION, False), d=gpulockd(2), two=slurm_job(22, 2)
    ),
    "two_cards": Cast(
        one=sge_job(11, 2, runs=2),
        card=sickens(0, LINK),
        other=sickens(1, ACTION, False),
        d=gpulockd(3),
        two=run_claim(2),
    ),
    "owner_dies": Cast(
        one=JOBS, card=sickens(0, LINK, False), end=shepherd_dies(), d=gpulockd(2), two=run_claim(2)
    ),
    "reboot": Cast(
        one=JOBS, card=sickens(0, LINK), power=reboot(), d=gpulockd(2), two=sge_job(12, 2)
    ),
    "tests": Cast(
        first=tests_card(0, 2), second=tests_card(1), two=needs_every_card(), d=gpulockd(2)
    ),
    "tests_and_jobs": Cast(
        first=tests_card(0, 2), one=sge_job(11, 4), d=gpulockd(2), two=run_claim(2), root=reap()
    ),
    "tests_of_sick_cards": Cast(
        card=sickens(0, LINK), first=tests_card(0, 2), one=sge_job(11, 3), d=gpulockd(3)
    ),
}
HEALTH_POINTS: tuple[tuple[str, str, str], ...] = (
    ("link", "d", KILL),
    ("link", "one", "card"),
    ("action", "d", FREEZE),
    ("slurm", "one", "d"),
    ("tests", "two", "first"),
    ("tests", "first", KILL),
    ("tests", "first", "two"),
    ("tests", "two", KILL),
    ("tests_and_jobs", "one", FREEZE),
)
