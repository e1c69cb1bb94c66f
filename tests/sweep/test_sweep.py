# SPDX-License-Identifier: Apache-2.0
"""Stop the hooks and reap at every system call: nothing granted twice, nothing lost.

GPULOCK_SWEEP_SAMPLE=N tries every N-th point, GPULOCK_SWEEP_SEED says which; FULL=1 (or
GPULOCK_SOAK=1) tries all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.scene import folder
from tests.sweep import daemon_cases, sge, slurm_other_cases, slurm_prolog_cases
from tests.sweep.play import Case, Play
from tests.sweep.tally import TALLY, WHOLE
from tests.sweep.trace import KINDS, STRACE, Point, failing, points_of, struck, watching

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(7200 if WHOLE else 900)]
CASES = (
    *sge.CASES,
    *daemon_cases.CASES,
    *slurm_prolog_cases.CASES,
    *slurm_other_cases.CASES,
)
ENOUGH = 5  # faults of a case
MISSED_SHARE = 0.05  # of the points of a kind may not be reached


@pytest.fixture(scope="session", autouse=True)
def strace() -> None:
    """Have strace, which a test installs on nobody's machine."""
    assert shutil.which(STRACE), "the sweep needs strace: apt-get install strace"


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def play(case: Case) -> Iterator[Play]:
    """Give a node in the state that the case starts from."""
    with folder("sweep") as root:
        made = case.make(root)
        try:
            made.set_out()
            yield made
        finally:
            made.stage.close()


def all_points(play: Play) -> list[Point]:
    """Trace the program undisturbed, after one run that is not counted."""
    stage = play.stage
    for _ in range(2):
        stage.reset()
        stage.must(play.run(watching(stage.log)), play.undisturbed)
    points = points_of(stage.log, play.marker)
    play.proper()
    assert not play.wrong, play.wrong
    return points


def test_a_fault_at_any_system_call_loses_nothing(play: Play, case: Case) -> None:
    stage = play.stage
    wrong: list[str] = []
    unreached: list[Point] = []
    for point in all_points(play):
        if not TALLY.is_drawn(case.name, point.kind, stage.is_near(point.text), case.thin):
            continue
        stage.reset()
        code = play.run(failing(point, stage.log))
        TALLY.tried[case.name, point.kind] += 1
        if not struck(point, stage.log):
            TALLY.missed[case.name, point.kind] += 1
            unreached.append(point)
            continue
        said = stage.stderr.read_text().strip()
        faults = play.check(point, code)
        wrong += [f"{point}\n    {fault}\n    exit {code}: {said}" for fault in faults]
        if len(wrong) > ENOUGH:
            break  # each may have waited a minute for what never came
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong)
    for kind in KINDS:
        tried, missed = TALLY.tried[case.name, kind], TALLY.missed[case.name, kind]
        calls = "\n".join(str(point) for point in unreached if point.kind == kind)
        assert missed <= max(1, MISSED_SHARE * tried), f"of {tried} not reached:\n{calls}"
