# SPDX-License-Identifier: Apache-2.0
"""The bench measures again on a busy machine or says why, and counts the targets it missed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import harness, hooks, paired, release
from tests.bench.harness import CPU, WAITED, Samples, Target, ratio_target, run_bench, run_rounds
from tests.support.faults import raising
from tests.support.scene import folder


@pytest.fixture(autouse=True)
def disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DISTURBED", type(harness.DISTURBED)())


def test_a_disturbed_act_is_undone_measured_again_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples: Samples = {}
    calls = iter(range(1000))

    def act() -> None:
        number = next(calls)
        samples.setdefault("row", []).append(number)
        if number % 3 == 0:
            raise RuntimeError("after the epilog 2 devices are locked, not 0")

    def measure(_: Path) -> list[Target]:
        run_rounds([act], samples, 5, lambda: None)
        return []

    assert run_bench("test", measure) == 0
    assert len(samples["row"]) == 5
    assert all(number % 3 for number in samples["row"])
    assert "4 x: after the epilog 2 devices are locked, not 0" in capsys.readouterr().out


def test_what_is_disturbed_every_time_is_an_error_that_says_how_busy_the_machine_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(_: Path) -> list[Target]:
        return harness.undisturbed(raising(RuntimeError("3 locks held")), lambda: None)

    assert run_bench("test", measure) == 1
    said = capsys.readouterr().err
    assert re.search(r"3 locks held, 10 times running; load .* processes", said)


@pytest.mark.parametrize(("slower", "missed"), [(1.0, False), (1.015, False), (1.03, True)])
@pytest.mark.parametrize("waited", [1.1, 4.0])
def test_a_prolog_that_a_change_made_slower_is_judged(
    slower: float, missed: bool, waited: float
) -> None:
    pairs = [
        ({"prolog": 9.0 * cpu, "prolog cpu": cpu}, {"prolog": cpu * waited, "prolog cpu": cpu})
        for cpu in (10.0, 11.0, 13.0)
    ]
    for before, now in pairs:
        if waited > WAITED:
            now["prolog cpu"] *= slower
        else:
            before["prolog"] = now["prolog"] / slower
    found = paired.prolog_target(pairs)
    assert (found.value > found.limit) is missed


def test_on_a_busy_machine_hooks_are_judged_by_processor_time() -> None:
    """Every hook waits twice as long as the floor, and works as long."""
    times = {"floor": [20.0], "prolog": [40.0]}
    busy, idle = (
        ratio_target({**times, "floor" + CPU: [cpu], "prolog" + CPU: [cpu]}, "prolog", "floor", 1.5)
        for cpu in (5.0, 18.0)
    )
    assert (busy.value, idle.value) == (1.0, 2.0)
    assert "processor time: the machine is busy" in busy.what


def test_the_targets_that_were_missed_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    targets = [Target("a", 1.0, 1.0), Target("b", 1.1, 1.0), Target("c", 0.9, 1.0)]
    assert harness.count_missed(targets) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


def test_a_machine_without_pids_for_the_processes_of_a_target_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "PID_MAX", 1)
    with (
        pytest.raises(RuntimeError, match=r"kernel\.pid_max is too low"),
        release.crowd(1 << 22),
    ):
        pass


@pytest.mark.slow
@pytest.mark.giant
def test_every_hook_is_measured_beside_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    with folder("bench-test") as root:  # a TaskProlog is the user's
        targets = hooks.measure(root, 1)
    assert len(targets) == len(hooks.LIMITS)
    assert all(0.3 < target.value < 100 for target in targets)
    shown = capsys.readouterr().out
    rows = {
        "floor",
        *(f"{scheduler}{hook}" for scheduler in ("", "slurm ") for hook in ("prolog", "epilog")),
    }
    assert all(f"\n  {row} " in shown for row in rows)
