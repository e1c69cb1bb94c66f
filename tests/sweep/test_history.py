# SPDX-License-Identifier: Apache-2.0
"""Stop the history's chore at every system call: no claim lost, none written twice."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.history_site import Ended
from tests.sweep.stage import LIBRARIES
from tests.sweep.tally import WHOLE
from tests.sweep.trace import KILL, STRACE, Point, failing, points_of, struck, watching

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(3000 if WHOLE else 900)]
PROGRAM = Path(__file__).with_name("history.py")
SAMPLE = 20  # points of a kind


def made(root: Path) -> Ended:
    """Return a node with one claim in the history and three that wait for it, one of them lost."""
    site = Ended(root)
    site.claim(3, token="first")
    site.write()
    site.run_job(3, token="gone")
    site.end(3)
    shutil.rmtree(site.finished("gone"))
    for own in (site.run_job(0, 1), site.run_job(2, token="beef")):
        numbers = (0, 1) if own.token == "feed" else (2,)
        site.finish(own, *(site.account(own, number) for number in numbers))
        site.end(*numbers)
    return site


def run(site: Ended, around: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the chore as a process, under strace."""
    command = [*around, sys.executable, "-IS", str(PROGRAM), LIBRARIES, site.config()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def points(root: Path) -> list[Point]:
    """Return every point of an undisturbed run; raise RuntimeError.

    The first run compiles what no run has compiled before, and so makes more calls than later ones.
    """
    run(made(root / "before"), [])
    site, log = made(root / "traced"), root / "strace.log"
    done = run(site, watching(log))
    if done.returncode or done.stderr or site.waiting() or site.owed():
        raise RuntimeError(f"undisturbed, it exits {done.returncode}: {done.stderr}")
    return points_of(log, site.config())


@pytest.mark.parametrize("kind", [KILL, "ENOSPC", "EIO", "EACCES"])
def test_no_claim_is_lost_and_none_is_written_twice(tmp_path: Path, kind: str) -> None:
    assert shutil.which(STRACE), "the sweep needs strace: apt-get install strace"
    every = [point for point in points(tmp_path) if point.kind == kind]
    if not WHOLE and len(every) > SAMPLE:
        every = random.Random(7).sample(every, SAMPLE)
    hit = 0
    for number, point in enumerate(every):
        site, log = made(tmp_path / str(number)), tmp_path / "strace.log"
        run(site, failing(point, log))
        hit += struck(point, log)
        after = run(site, [])
        assert (after.returncode, after.stderr) == (0, ""), point
        assert sorted(site.tokens()) == ["beef", "feed", "first", "gone"], point
        assert (site.waiting(), site.owed()) == ([], []), point
        by_token = {found["token"]: found for found in site.lines()}
        assert by_token["feed"]["gpus"] == 2, point
        shutil.rmtree(tmp_path / str(number))
    assert hit >= 0.8 * len(every) > 0, "too few points were reached"
