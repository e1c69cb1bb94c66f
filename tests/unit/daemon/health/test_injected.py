# SPDX-License-Identifier: Apache-2.0
"""GPUs that fail at random, by default settings: no job gets a sick one, a sound one comes back.

Told: what a look of gpulockd could know before the job. Of a GPU that the driver lists and does not
answer for it is first that jobs take it last, then that it is out.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.release import release_locks
from gpulock.daemon.health import policy, recovery
from gpulock.daemon.health.recovery import ADMIN_RESTORE_ONLY, MAX_COMEBACKS
from tests.support.health_site import Ward
from tests.support.trees import BOOT, bus, judge_of, judging, record, soon

CARDS, HALF = 8, 4
XID, LOST, HANGS, GONE = "xid", "lost", "hangs", "gone"
LOOKS = {XID: 1, LOST: 3, HANGS: 3, GONE: 3}  # after which a sick GPU is out
BACK_LOOKS = 4  # after which a sound GPU is back: three clean checks, and the one that began them
DAY = 86400.0


class Faults(Ward):
    """A node whose GPUs fail as a dice says; `sick` has kind and looks, `sound` the looks since."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__(root, CARDS)
        del self.settings["QUARANTINE_ON"]
        self.dice = random.Random(seed)
        self.sick: dict[int, tuple[str, int]] = {}
        self.sound: dict[int, int] = {}
        self.xids = dict.fromkeys(range(CARDS), 0)
        self.backs: dict[int, list[float]] = {number: [] for number in range(CARDS)}
        self.injected = 0
        self.before: set[int] = set()
        for number in range(CARDS):
            self.answer(number)
        monkeypatch.setattr(policy, "time", SimpleNamespace(time=lambda: self.now))
        self.round()

    def answer(self, number: int) -> None:
        """Let a GPU answer, with the XIDs that it had in this boot."""
        self.lost.pop(number, None)
        self.tell(number, *([f"x.79={self.xids[number]},1.0"] if self.xids[number] else []))

    def away(self) -> set[int]:
        """Return which GPUs are out of service."""
        names = self.out()
        return {number for number in range(CARDS) if bus(number) in names}

    def inject(self) -> None:
        """Let a sound GPU in service fail, where half of the node stays."""
        out = self.away() | set(self.sick)
        if len(out) >= HALF:
            return
        number = self.dice.choice([n for n in range(CARDS) if n not in out])
        kind = self.dice.choice([XID, LOST, HANGS, GONE])
        if kind == XID:
            self.xids[number] += 1
            self.answer(number)
        elif kind == GONE:
            (self.driver / "gpus" / bus(number)).rename(self.root / bus(number))
            del self.facts[number]
        else:
            self.lose(number, "GPU is lost" if kind == LOST else "a call for it hangs")
        self.sick[number] = kind, 0
        self.sound.pop(number, None)
        self.injected += 1

    def repair(self) -> None:
        """Let a sick GPU be sound again: one with an XID was reset, or the driver loaded anew."""
        if not self.sick:
            return
        number = self.dice.choice(sorted(self.sick))
        kind, _ = self.sick.pop(number)
        if kind == GONE:
            (self.root / bus(number)).rename(self.driver / "gpus" / bus(number))
        if kind == XID and any(of == XID for of, _ in self.sick.values()):
            recovery.note_reset(str(self.lock), BOOT, bus(number), self.now)
        elif kind == XID:
            self.reload()
        self.answer(number)
        self.sound[number] = 0

    def restore_by_hand(self) -> None:
        """Let an administrator bring sound GPUs back that nobody else may."""
        for number in self.away() - set(self.sick):
            if ADMIN_RESTORE_ONLY in self.reason(number):
                self.restored(number)
                self.before.discard(number)

    def look(self) -> None:
        """Let a round pass, then a job of all GPUs that are sound and in service."""
        self.round()
        self.sick = {number: (kind, looks + 1) for number, (kind, looks) in self.sick.items()}
        self.sound = {number: looks + 1 for number, looks in self.sound.items()}
        out = self.away()
        for number in self.before - out:
            self.backs[number] = [at for at in self.backs[number] if at > self.now - DAY]
            self.backs[number].append(self.now)
            assert len(self.backs[number]) <= MAX_COMEBACKS, "it flaps more often than told"
            assert number not in self.sick, "nothing sick comes back"
        self.before = out
        for number, (kind, looks) in self.sick.items():
            assert number in out or looks < LOOKS[kind], (number, kind, looks)
        for number, looks in self.sound.items():
            kept = number in out and ADMIN_RESTORE_ONLY not in self.reason(number)
            assert not kept or looks < BACK_LOOKS, "a sound one is kept no longer than its checks"
        free = set(range(CARDS)) - out - set(self.sick)
        assert len(free) >= CARDS - HALF
        assert self.job(len(free)) == {bus(number) for number in free}

    def job(self, count: int) -> set[str]:
        """Let a job have so many GPUs and end; return them."""
        node = self.node()
        own = record(token="", devices=())
        grant = claim_devices(node, own, ClaimRequest(count), judging(node), soon())
        token = grant.owner.token
        release_locks(node, lambda owner: owner.token == token, judge_of(node), soon(), "over")
        return {device.id for device in grant.devices}

    def play(self, faults: int) -> None:
        """Go on until so many faults were injected."""
        while self.injected < faults:
            act = self.dice.random()
            if act < 0.5:
                self.inject()
            elif act < 0.85:
                self.repair()
            elif act < 0.9:
                self.now += self.dice.uniform(0, DAY / 3)
            else:
                self.restore_by_hand()
            for _ in range(self.dice.randint(1, 4)):
                self.look()
        assert any(self.backs.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_job_gets_a_sick_gpu_and_a_sound_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    Faults(tmp_path, monkeypatch, seed).play(40)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_of_ten_thousand_faults_none_reaches_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    Faults(tmp_path, monkeypatch, seed).play(10_000)
