# SPDX-License-Identifier: Apache-2.0
"""`make bench` needs what gpulock needs to run; on a busy machine it measures again or says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.workstation.process_claims import make_liveness_judge, make_process_owner
from tests.bench import disturbed, inprocess, looks, paired, table
from tests.bench.nvml_free import bare_look
from tests.bench.rounds import CPU, Samples, run_rounds
from tests.nvml.double import Double
from tests.support.exporter_nvml import Eye
from tests.support.faults import raising

ROOT = Path(__file__).resolve().parents[3]
RUNTIME_ONLY = """
import importlib, sys
sys.path[:0] = ["", "exporter"]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "pytest", "grimp", "_pytest"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbed, "TOLD", type(disturbed.TOLD)())


def test_it_imports_nothing_that_only_the_tests_need() -> None:
    """After `make demo` alone there is neither hypothesis nor pytest."""
    modules = ("tests.bench.run", "tests.bench.history", "tests.bench.daemon", "tests.bench.walks")
    done = subprocess.run(
        [sys.executable, "-c", RUNTIME_ONLY, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_disturbed_act_is_undone_measured_again_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples: Samples = {}
    undone: list[int] = []
    calls = iter(range(1000))

    def act() -> None:
        number = next(calls)
        samples.setdefault("row", []).append(number)
        if number % 3 == 0:
            raise RuntimeError("after the epilog 2 devices are locked, not 0")

    run_rounds([act], samples, 5, 1, lambda: undone.append(1))
    assert len(samples["row"]) == 5
    assert all(number % 3 for number in samples["row"])
    disturbed.print_disturbances()
    said = capsys.readouterr().out
    assert f"{len(undone)} x: after the epilog 2 devices are locked, not 0" in said
    assert "load " in said


def test_what_is_disturbed_every_time_is_an_error_that_says_how_busy_the_machine_is() -> None:
    with pytest.raises(RuntimeError, match=r"3 locks held, 10 times running; load .* processes"):
        disturbed.undisturbed(raising(RuntimeError("128 held, dead: 3 locks held")), lambda: None)


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.015, 0), (1.03, 1)])
@pytest.mark.parametrize("waited", [1.1, 4.0])
def test_a_prolog_that_a_change_made_slower_is_judged(
    capsys: pytest.CaptureFixture[str], slower: float, code: int, waited: float
) -> None:
    pairs = [
        ({"prolog": 9.0 * cpu, "prolog cpu": cpu}, {"prolog": cpu * waited, "prolog cpu": cpu})
        for cpu in (10.0, 11.0, 13.0)
    ]
    for before, now in pairs:
        if waited > table.WAITED:
            now["prolog cpu"] *= slower
        else:
            before["prolog"] = now["prolog"] / slower
    assert paired.judge_pairs(pairs) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


def test_after_locks_were_taken_away_every_device_can_be_claimed_again(tmp_path: Path) -> None:
    node = Node(read_settings(str(write_simulated_node(tmp_path / "node", "workstation").config)))
    record = make_process_owner(node, os.getpid(), "bench")
    whole = ClaimRequest(len(node.devices()))

    for _ in range(2):
        claim_devices(node, record, whole, lambda: make_liveness_judge(node), Deadline(20))
        disturbed.take_locks_away(node)


def test_every_part_of_a_claim_within_a_process_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wraps methods of the product by their names, and one had been renamed."""

    def at_once(act: Callable[[], object]) -> object:
        return act()

    monkeypatch.setattr(inprocess, "uninterrupted", at_once)

    rows = inprocess.claims(tmp_path / "claims", 2)

    assert {len(row) for row in rows.values()} == {2}
    assert all(min(row) > 0 for row in rows.values())


def test_the_bare_look_makes_the_calls_of_the_exporter(tmp_path: Path) -> None:
    """What it makes is taken for the cost of the double: see nvml_free."""
    looks, begun = 10, 5  # process lists are asked for at one look of ten
    with Double(tmp_path / "nvml", preset="dgx-h200") as nvml:
        command = bare_look(tmp_path, nvml)
        at = [nvml.calls()]
        for count in (begun, begun + looks):
            subprocess.run([*command, str(count)], env={**os.environ, **nvml.env}, check=True)
            at.append(nvml.calls())
        bare = (at[2] - at[1]) - (at[1] - at[0])
        with Eye(nvml, stopped=True) as eye:
            for _ in range(begun):
                eye.look()
            before = nvml.calls()
            for number in range(looks):
                eye.look(processes=number == 0)
            ours = nvml.calls() - before
    samples = "nvmlDeviceGetSamples"  # the buffer does not fill as fast as the clock is set
    assert looks * 8 == bare.pop(samples) <= ours.pop(samples)
    assert bare == ours


def hook_samples(cpu: float) -> Samples:
    """Return one round: every hook waits twice as long as the floor, and works as long."""
    rows = [row for target in table.HOOK_TARGETS for row in target[:2]]
    times = {row: [20.0 if row == "floor" else 40.0] for row in rows}
    return times | {f"{row}{CPU}": [cpu] for row in rows}


def test_on_a_busy_machine_hooks_are_judged_by_processor_time() -> None:
    busy, idle = (table.hook_targets(hook_samples(cpu)) for cpu in (5.0, 18.0))

    assert [found for what, found, _ in busy if "floor" in what] == [1.0] * 5
    assert all("processor time: the machine is busy" in what for what, _, _ in busy)
    assert [found for what, found, _ in idle if "floor" in what] == [2.0] * 5


def test_the_targets_that_were_missed_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.print_targets([("a", 1.0, 1.0), ("b", 1.1, 1.0), ("c", 0.9, 1.0)]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


def test_a_machine_without_pids_for_the_processes_of_a_target_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(read_settings(str(write_simulated_node(tmp_path / "node", "workstation").config)))

    def no_list(_: Path) -> AbstractContextManager[str]:
        return nullcontext("")

    def no_room(_: int) -> AbstractContextManager[bool]:
        return nullcontext(False)

    monkeypatch.setattr(looks, "process_list", no_list)
    monkeypatch.setattr(looks, "room_for", no_room)
    with pytest.raises(RuntimeError, match=r"200 processes: kernel\.pid_max is too low"):
        looks.measure(tmp_path, node, (3000, 30000))
