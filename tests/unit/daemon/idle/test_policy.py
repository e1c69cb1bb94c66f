# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: once a claim, on what was observed, never to the wrong process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.alloc import reaper
from gpulock.alloc.reaper import FREED, HELD, ReapOutcome
from gpulock.daemon.idle import command
from gpulock.daemon.idle.command import (
    ClaimFacts,
    build_idle_environment,
    check_program_trust,
    is_safe_shell_word,
)
from gpulock.daemon.idle.policy import IdlePolicy
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.store import verdicts
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, UNKNOWN, Verdict
from tests.support.history_site import Ended
from tests.support.scripts import write_script
from tests.support.trees import bus

HOUR = 3600.0


class Lab(Ended):
    """A node with claims that idle, and a command that writes down what it was told."""

    def __init__(self, root: Path, **keys: str) -> None:
        self.told_file = root / "told"
        self.program = root / "command"
        self.writes = f'{{ env | sort; echo "$1 $GPULOCK_JOB_ID"; }} >> "{self.told_file}"'
        self.script(self.writes)
        defaults = {"IDLE_WARN": "600", "IDLE_COMMAND": str(self.program)}
        super().__init__(root, **{**defaults, **keys})
        self.said: list[str] = []
        self.idle = IdlePolicy(self.said.append)
        self.later = 0.0  # seconds that went by since the test began

    def script(self, body: str) -> None:
        """Write the command."""
        write_script(self.program, body)

    def idles(self, own: Owner, number: int, seconds: float = 700.0, **fields: Any) -> str:
        """Return the exporter's line of a device that idles for so long."""
        now = self.now()
        about = {"observed": 900.0, "seen": now, "idle": seconds, "until": now, **fields}
        return self.account(own, number, **about)

    def hold_idle(self, seconds: float = 700.0, ago: float = HOUR, **fields: Any) -> None:
        """Let a claim stand that idles for so long, as the exporter tells."""
        self.sample(self.idles(self.hold(0, ago=ago), 0, seconds, **fields))

    def report(self, act: reaper.ReapAct, state: verdicts.State) -> ReconcileReport:
        """Return what a reconcile says of every lock."""
        found = self.node().store.read_detailed_locks().values()
        return ReconcileReport(
            [], [ReapOutcome(lock, act, Verdict(state, ""), "") for lock in found]
        )

    def now(self) -> float:
        """Return CLOCK_BOOTTIME as the test has it."""
        return clock_boottime() + self.later

    def passes(self, seconds: float, *idlers: tuple[Owner, int]) -> None:
        """Let time go by, in which these claims idle on."""
        self.later += seconds
        lines = [self.idles(own, n, 3000.0, observed=3500.0) for own, n in idlers]
        self.sample(*lines, ago=-self.later)

    def look(self, act: reaper.ReapAct = HELD, state: verdicts.State = ALIVE) -> None:
        """Run the chore once."""
        self.idle.run(self.node(), self.report(act, state), self.now())

    def round(self, act: reaper.ReapAct = HELD, state: verdicts.State = ALIVE) -> None:
        """Run the chore once, and what it started to its end."""
        self.look(act, state)
        self.turns()

    def turns(self) -> None:
        """Let go on what has begun or waits, as the loop does, until there is nothing left."""
        while self.idle.due < float("inf"):
            self.finish_command()
            self.idle.run_due(self.now())

    def finish_command(self) -> None:
        """Wait for the command."""
        command = self.idle.command
        if command is not None:
            os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)

    def restart(self) -> None:
        """Let another gpulockd take over."""
        self.idle.close()
        self.idle = IdlePolicy(self.said.append)

    def commands(self, pattern: str) -> list[str]:
        """Return what the command wrote in lines like this, in order."""
        text = self.told_file.read_text() if self.told_file.exists() else ""
        return re.findall(f"^{pattern}$", text, re.MULTILINE)

    def warned(self) -> list[str]:
        """Return the jobs that the command was run for, in order."""
        return self.commands("GPULOCK_JOB_ID=(.*)")

    def killed(self) -> list[str]:
        """Return the jobs that the command was to end, in order."""
        return self.commands("kill (.*)")

    def facts(self) -> dict[str, str]:
        """Return the last facts that the command was told."""
        return dict(line.split("=", 1) for line in self.commands("GPULOCK_.*"))

    def calls(self) -> int:
        """Return how often the command ran."""
        return len(self.commands("GPULOCK_EVENT=.*"))

    def idlers(self, count: int) -> list[tuple[Owner, int]]:
        """Let so many jobs, 100 and on, hold a device each."""
        about = [{"token": f"t{n}", "job_id": f"10{n}"} for n in range(count)]
        return [(self.hold(n, ago=HOUR, **one), n) for n, one in enumerate(about)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.idle.close()


def test_a_claim_that_idles_is_told_once_with_the_facts(lab: Lab) -> None:
    own = lab.hold(0, 1, ago=HOUR)
    lab.sample(lab.idles(own, 0, 700), lab.idles(own, 1, 650))
    for _ in range(3):
        lab.round()
    assert (lab.calls(), len(lab.said)) == (1, 1)
    facts = lab.facts()
    names = ("EVENT", "JOB_ID", "USER", "IDLE_SECONDS", "KILL_SECONDS", "DEVICES")
    found = [facts[f"GPULOCK_{name}"] for name in names]
    assert found == ["warn", "12", "alice", "650", "0", f"{bus(0)},{bus(1)}"]
    assert float(facts["GPULOCK_HELD_SECONDS"]) == pytest.approx(HOUR, abs=2)
    assert "idle for 650 observed seconds" in lab.said[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": 599.0},
        {"observed": 500.0},
        {"seen": 5.0},
        {"observed": 0.0},
        {"idle": "nan"},
        {"seconds": 1e9, "observed": 1e9, "ago": 60.0},  # no claim idles longer than it stands
    ],
)
def test_what_was_not_seen_to_idle_for_long_enough_is_left_alone(
    lab: Lab, fields: dict[str, Any]
) -> None:
    lab.hold_idle(**fields)
    lab.round()
    assert (lab.calls(), lab.said) == (0, [])


def test_a_claim_with_one_device_at_work_or_unseen_does_not_idle(lab: Lab) -> None:
    own = lab.hold(0, 1, ago=HOUR)
    lab.sample(lab.idles(own, 0), lab.idles(own, 1, 3.0))
    lab.round()
    lab.sample(lab.idles(own, 0))
    lab.round()
    assert lab.calls() == 0


@pytest.mark.parametrize("why", ["old", "draining", "admin", "freed", "off"])
def test_the_policy_leaves_alone(lab: Lab, why: str) -> None:
    kinds: dict[str, Any] = {"draining": {"draining": 1}, "admin": {"scheduler": "admin"}}
    own = lab.hold(0, ago=HOUR, **kinds.get(why, {}))
    lab.sample(lab.idles(own, 0), ago=60 if why == "old" else 0)
    if why == "off":
        lab.settings["IDLE_WARN"] = "0"
    lab.round(act=FREED if why == "freed" else HELD)
    assert (lab.calls(), lab.said) == (0, [])


def test_commands_run_one_after_another_and_none_holds_up_a_round(lab: Lab) -> None:
    lab.passes(0, *lab.idlers(3))
    lab.script(
        f'read x < "{lab.root}/fifo"; echo GPULOCK_EVENT=$GPULOCK_EVENT >> "{lab.told_file}"'
    )
    os.mkfifo(lab.root / "fifo")
    for _ in range(2):
        lab.look()
    assert (lab.calls(), len(lab.said)) == (0, 3)
    for number in range(3):
        (lab.root / "fifo").write_text("go\n")
        lab.finish_command()
        assert lab.calls() == number + 1
        lab.idle.run_due(lab.now())


def test_the_end_of_a_claim_is_told_whatever_rounds_come_and_is_no_warning(lab: Lab) -> None:
    own = lab.hold(0, ago=HOUR)
    lab.idle.tell_end(ClaimFacts(own, own.devices, 0.0, alive=True))
    lab.round()
    assert lab.facts()["GPULOCK_EVENT"] == "end"
    lab.sample(lab.idles(own, 0))
    lab.round()
    assert (lab.calls(), lab.facts()["GPULOCK_EVENT"]) == (2, "warn")


def test_a_command_that_does_not_end_is_ended_with_all_it_started(lab: Lab) -> None:
    lab.hold_idle()
    lab.script("sleep 1000 & sleep 1000")
    lab.look()
    assert lab.idle.command is not None
    lab.idle.run_due(clock_boottime() + command.SECONDS + 1)
    assert "was ended after 30 s" in lab.said[-1]
    assert lab.idle.command is None


@pytest.mark.parametrize("act", ["group", "folder", "missing", "plain"])
def test_a_command_that_others_could_have_written_is_not_run(lab: Lab, act: str) -> None:
    if act == "folder":
        lab.program.parent.chmod(0o777)
    elif act == "missing":
        lab.program.unlink()
    else:
        lab.program.chmod(0o775 if act == "group" else 0o644)
    lab.hold_idle()
    lab.round()
    assert lab.calls() == 0
    assert "is not run" in lab.said[-1]
    assert check_program_trust(str(lab.program), os.geteuid())


def test_what_a_user_could_have_chosen_is_a_plain_word_or_nothing(lab: Lab) -> None:
    own = lab.hold(0, ago=HOUR, user="-x; rm", queue="$(id)", job_id="12 13")
    claim = ClaimFacts(own, (bus(0),), 5.0, alive=True)
    facts = build_idle_environment(lab.node().settings, claim, "warn", clock_boottime())
    assert (facts["GPULOCK_USER"], facts["GPULOCK_QUEUE"], facts["GPULOCK_JOB_ID"]) == ("", "", "")
    assert facts["GPULOCK_UID"] == "1000"
    assert set(facts) - {"PATH", "SGE_CELL", "SGE_SINGLE_LINE"} == {
        key for key in facts if key.startswith("GPULOCK_")
    }
    assert not any(
        is_safe_shell_word(word) for word in ("", "-a", "a b", "a\n", "`a`", "a;b", "x" * 300)
    )


def test_a_warning_comes_before_the_end_and_the_end_comes_once(lab: Lab) -> None:
    lab.settings["IDLE_KILL"] = "1200"
    own = lab.hold(0, ago=HOUR)
    lab.passes(0, (own, 0))
    lab.round()
    lab.passes(600, (own, 0))
    lab.round(state=UNKNOWN)
    assert (lab.warned(), lab.killed()) == (["12"], [])
    for _ in range(3):
        lab.round()
    assert (lab.warned(), lab.killed()) == (["12", "12"], ["12"])
    assert lab.facts()["GPULOCK_EVENT"] == "kill"
    assert lab.said[-1].endswith("observed seconds: IDLE_COMMAND kill")


def test_after_a_restart_each_claim_is_warned_once_more_before_its_end(lab: Lab) -> None:
    lab.settings["IDLE_KILL"] = "1200"
    idlers = lab.idlers(3)
    lab.passes(0, *idlers)
    lab.round()
    assert lab.warned() == ["100", "101", "102"]
    lab.restart()
    for _ in range(2):
        lab.passes(500, *idlers)
        lab.round()
    assert (lab.warned(), lab.killed()) == (["100", "101", "102"] * 2, [])


def test_a_job_that_works_again_in_time_is_not_warned(lab: Lab) -> None:
    idlers = lab.idlers(2)
    lab.passes(0, *idlers)
    lab.look()
    lab.passes(10, idlers[0])
    lab.round()
    assert lab.warned() == ["100"]


def test_no_job_is_killed_before_its_warning_command_could_run(lab: Lab) -> None:
    lab.settings["IDLE_KILL"] = "1200"
    own = lab.hold(0, ago=HOUR)
    lab.program.chmod(0o644)
    for _ in range(3):
        lab.passes(600, (own, 0))
        lab.round()
    assert (lab.warned(), lab.killed()) == ([], [])
    assert len(lab.said) == 2
    lab.program.chmod(0o755)
    lab.round()
    assert lab.warned() == ["12"]


def test_an_end_that_failed_is_tried_again_after_a_minute(lab: Lab) -> None:
    lab.settings |= {"IDLE_KILL": "1200", "IDLE_WARN": "0"}
    own = lab.hold(0, ago=HOUR)
    lab.script(f"{lab.writes}; exit 3")
    for _ in range(3):
        lab.passes(30, (own, 0))
        lab.round()
    assert lab.killed() == ["12", "12"]
    assert len(lab.said) == 1 and "ended with 3: it is run again every minute" in lab.said[0]
    lab.restart()
    lab.script(lab.writes)
    for _ in range(2):
        lab.passes(30, (own, 0))
        lab.round()
    assert lab.killed() == ["12"] * 3
