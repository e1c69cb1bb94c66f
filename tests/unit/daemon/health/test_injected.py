# SPDX-License-Identifier: Apache-2.0
"""GPUs that fail at random: no job gets a sick one for a sound one, a sound one comes back in time.

Known: what a look of gpulockd could know before the job. Of a GPU that the driver lists and does
not answer for it is first that jobs take it last, then that it is out. A GPU with a narrow link or
memory in use, or that fails HEALTH_COMMAND, stays in service and is taken last.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.alloc.release import release_locks
from gpulock.daemon.health import checker, recovery
from gpulock.daemon.health.cards import COMMAND
from gpulock.daemon.health.checker import AGAIN, CardChecker
from gpulock.daemon.health.findings import MIB
from gpulock.daemon.health.health_command import CheckOutcome
from gpulock.daemon.health.recovery import ADMIN_RESTORE_ONLY, MAX_COMEBACKS
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import quarantine
from tests.support.claims import ask, ids
from tests.support.health_site import ROUND, Ward
from tests.support.seeds import chosen_seed
from tests.support.trees import bus, judge_of, soon

CARDS, HALF = 8, 4
XID, LOST, HANGS, GONE, RECOVERY, LINK = "xid", "lost", "hangs", "gone", "recovery", "link"
ECC, MEMORY = "ecc", "memory"
DEFAULT = (XID, LOST, HANGS, GONE, RECOVERY, LINK)
EVERY = (*DEFAULT, ECC, MEMORY, COMMAND)
RESTARTED = (XID, ECC, RECOVERY)  # a reload of the driver ends them
# after which a sick GPU is out
LOOKS = {XID: 1, RECOVERY: 1, ECC: 1, LOST: 3, HANGS: 3, GONE: 3}
BACK_LOOKS = 4  # after which a sound GPU is back: three clean checks, and the one that began them
TEST_LOOKS = HALF + 2  # until HEALTH_COMMAND has passed: one at a time, those that are out first
AGAIN_LOOKS = int(AGAIN / ROUND) + 1  # more, where it has failed
DAY = 86400.0


class Faults(Ward):
    """A node whose GPUs fail as a dice says; `sick` has kind and looks, `sound` the looks since.

    With HEALTH_COMMAND the GPUs fail in `kinds` that the default policy does not know, too.
    """

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, commanded: bool
    ) -> None:
        keys = {"HEALTH_COMMAND": "/bin/true", "QUARANTINE_ON": "xid ecc missing"}
        super().__init__(root, CARDS, **(keys if commanded else {}))
        if not commanded:
            del self.settings["QUARANTINE_ON"]
        self.kinds = EVERY if commanded else DEFAULT
        self.dice = random.Random(seed)
        self.sick: dict[int, tuple[str, int]] = {}
        self.sound: dict[int, int] = {}
        self.late: dict[int, int] = {}  # looks that a test of a sound GPU may take
        self.times = {kind: dict.fromkeys(range(CARDS), 0) for kind in (ECC,)}
        self.backs: dict[int, list[float]] = {number: [] for number in range(CARDS)}
        self.injected = dict.fromkeys(self.kinds, 0)
        self.jobs = self.sick_granted = 0
        self.before: set[int] = set()
        for number in range(CARDS):
            self.answer(number)
        for module in (recovery, quarantine):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr(checker, "HealthCommand", self.make_test)
        self.checker = CardChecker(self.journal, lambda: self.now)
        self.round()

    def make_test(self, _node: Node, device: Device, now: float) -> SimpleNamespace:
        """Return a HEALTH_COMMAND that is over by the next look."""
        number = next(n for n in range(CARDS) if bus(n) == device.bus)

        def poll(_node: Node, _now: float) -> CheckOutcome:
            failed = self.sick.get(number, ("", 0))[0] == COMMAND
            return CheckOutcome(not failed, f"it ended with {3 * failed}")

        return SimpleNamespace(bus=device.bus, begun=now, poll=poll)

    def answer(self, number: int, kind: str = "") -> None:
        """Let a GPU answer, with what it had in this boot, and with a fault of this kind now."""
        self.lost.pop(number, None)
        errors = self.times[ECC][number]
        facts = ["pcie_width=16", "pcie_width_max=16", f"recovery_action={int(kind == RECOVERY)}"]
        facts += [f"uncorrected={errors}"] if errors else []
        facts += ["pcie_width=4"] if kind == LINK else []
        facts += [f"memory_used={1024 * MIB}"] if kind == MEMORY else []
        self.tell(number, *facts)

    def failed(self) -> set[int]:
        """Return which GPUs fail HEALTH_COMMAND, as far as they were tested."""
        cards = self.cards()
        return {n for n in range(CARDS) if cards.of(bus(n)).checks.get(COMMAND)}

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
        kind = self.dice.choice(self.kinds)
        if kind == XID:
            self.log_xid(number)
        if kind in self.times:
            self.times[kind][number] += 1
        if kind == GONE:
            (self.driver / "gpus" / bus(number)).rename(self.root / bus(number))
            del self.facts[number]
        elif kind in (LOST, HANGS):
            self.lose(number, "GPU is lost" if kind == LOST else "a call for it hangs")
        else:
            self.answer(number, kind)
        self.sick[number] = kind, 0
        self.sound.pop(number, None)
        self.injected[kind] += 1

    def repair(self) -> None:
        """Let a sick GPU be sound again: by a driver that is loaded anew, which has lost its XID.

        Where that would be another's end, too, it is reset and restored by an administrator.
        """
        if not self.sick:
            return
        number = self.dice.choice(sorted(self.sick))
        kind, _ = self.sick.pop(number)
        alone = not any(of in RESTARTED for of, _ in self.sick.values())
        if kind in RESTARTED and not alone and number not in self.away():
            self.sick[number] = kind, 0
            return
        if kind == GONE:
            (self.root / bus(number)).rename(self.driver / "gpus" / bus(number))
        if kind in RESTARTED and alone:
            self.reload()
            self.sound = dict.fromkeys(self.sound, 0)  # those that are out are tested anew
        elif kind in RESTARTED:
            self.restored(number)
            self.before.discard(number)
        self.answer(number)
        self.sound[number] = 0
        tested = TEST_LOOKS if COMMAND in self.kinds else 0
        self.late[number] = tested + (AGAIN_LOOKS if number in self.failed() else 0)

    def restore_by_hand(self) -> None:
        """Let an administrator bring sound GPUs back that nobody else may."""
        for number in self.away() - set(self.sick):
            if ADMIN_RESTORE_ONLY in self.reason(number):
                self.restored(number)
                self.before.discard(number)

    def look(self) -> None:
        """Let a round pass, then a job of so many GPUs as the dice says."""
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
            assert number in out or looks < LOOKS.get(kind, looks + 1), (number, kind, looks)
        failed = self.failed()
        for number, looks in self.sound.items():
            kept = number in out and ADMIN_RESTORE_ONLY not in self.reason(number)
            late = kept or number in failed
            limit = BACK_LOOKS + self.late[number]
            assert not late or looks < limit, "a sound one is kept no longer than its checks"
        gone = {number for number, (kind, _) in self.sick.items() if kind == GONE}
        free = set(range(CARDS)) - out - gone
        sound = free - set(self.sick) - failed
        unknown = {n for n, sick in self.sick.items() if sick == (MEMORY, 1)}
        unknown |= {n for n, (kind, _) in self.sick.items() if kind == COMMAND and n not in failed}
        known = self.sick.keys() - unknown
        assert len(free - known) >= CARDS - HALF
        got = self.job(self.dice.randint(1, len(free)))
        assert got <= free
        assert not got & known or sound <= got, "no sick one is granted while a sound one is free"
        self.jobs += 1
        self.sick_granted += bool(got & known)

    def job(self, count: int) -> set[int]:
        """Let a job have so many GPUs and end; return them."""
        node, grant = self.node(), ask(self, count)
        token = grant.owner.token
        release_locks(node, lambda owner: owner.token == token, judge_of(node), soon(), "over")
        return {number for number in range(CARDS) if bus(number) in ids(grant)}

    def pause(self, seconds: float) -> None:
        """Let gpulockd look at nothing for so long: the next look adds no time to what lasts."""
        self.now += seconds
        for number, (kind, looks) in self.sick.items():
            lasts = LOOKS.get(kind, 0) > 1 or (kind, looks) == (MEMORY, 1)
            self.sick[number] = kind, max(looks - lasts, 0)

    def play(self, faults: int) -> None:
        """Go on until so many faults were injected."""
        while sum(self.injected.values()) < faults:
            act = self.dice.random()
            if act < 0.5:
                self.inject()
            elif act < 0.85:
                self.repair()
            elif act < 0.9:
                self.pause(self.dice.randint(0, int(DAY / 3)))
            else:
                self.restore_by_hand()
            for _ in range(self.dice.randint(1, 4)):
                self.look()
        assert any(self.backs.values())
        assert all(self.injected.values())
        print(f"{self.injected}: {self.jobs} jobs, {self.sick_granted} took a sick GPU last")


@pytest.mark.slow
@pytest.mark.parametrize("commanded", [False, True])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.giant)])
def test_no_job_gets_a_sick_gpu_and_a_sound_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, commanded: bool
) -> None:
    Faults(tmp_path, monkeypatch, seed, commanded=commanded).play(60)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("commanded", [False, True])
def test_of_ten_thousand_faults_none_reaches_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, commanded: bool
) -> None:
    seed = chosen_seed("GPULOCK_SEED")
    print(f"GPULOCK_SEED={seed}")
    Faults(tmp_path, monkeypatch, seed, commanded=commanded).play(5_000)
