# SPDX-License-Identifier: Apache-2.0
"""`make bench` needs what gpulock needs to run; on a busy machine it measures again or says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import disturbed
from tests.bench.rounds import Samples, run_rounds
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
