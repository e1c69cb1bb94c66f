# SPDX-License-Identifier: Apache-2.0
"""Another release of gpulock on a node of a real scheduler whose jobs begin, run and end.

The older release is this tree under an older number, as none was made yet. A package's files are
replaced as dpkg does it: each by a rename, beneath the gpulockd that runs from them. The newer
release renews the hooks by the command of docs/upgrade.md. The older one has no such command: the
installer's own place swaps them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from gpulock import __version__
from gpulock.install.versions import CURRENT, FOLDER
from tests.labs.both.conftest import SELECTING, SGE, SLURM
from tests.labs.both.site import Site
from tests.labs.common.installed import CONFIG, SOAK, gate_file, totals
from tests.labs.common.journal import Journal, doubles
from tests.labs.common.reaped import REPOSITORY
from tests.labs.daemon.daemon_lab import Daemon, daemon_on
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
PARTS: Final = ("gpulock", "prolog", "epilog")
JOBS: Final = 200 if SOAK else 10  # that run at the same time through every step
WAVE: Final = 20 if SOAK else 4  # short ones that begin and end at each step
# by which the journal knows a job of either scheduler
NAMED: Final = (
    "SLURM_JOB_ID=${SLURM_JOB_ID:-$JOB_ID} SLURMD_NODENAME=${SLURMD_NODENAME:-$HOSTNAME}\n"
)
GPULOCKD: Final = (
    "import sys; sys.path[:0] = [{!r}]; from gpulock.daemon.app import main; sys.exit(main())"
)
INSTALL_HOOKS: Final = """
import sys
sys.path[:0] = sys.argv[1:2]
from gpulock.cli import main
sys.argv[1:] = ["--config", sys.argv[2], "install", "hooks"]
main()
"""


def write_this_release(place: Path, version: str) -> None:
    """Write this tree under another number into a new folder."""
    for part in PARTS:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(REPOSITORY, part), place / part, ignore=skipped)
    replace_text(place / "gpulock/__init__.py", f'"{__version__}"', f'"{version}"')


def write_newer_release(place: Path) -> None:
    """Write this tree as a later one, whose records have a field that this one does not know."""
    write_this_release(place, "99.0")
    written = "    return VERSION_LINE"
    replace_text(
        place / "gpulock/store/owner.py", written, f'    pairs.append(("later", "1"))\n{written}'
    )


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace what stands once in a file."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old}"
    path.write_text(text.replace(old, new))


@dataclass(frozen=True)
class Package:
    """Where one release of gpulock is installed; releases are trees beside it."""

    place: Path

    def put(self, release: Path) -> None:
        """Replace the files by those of a release, as dpkg does: each by a rename."""
        wanted = {path.relative_to(release) for path in release.rglob("*") if path.is_file()}
        for name in sorted(wanted):
            target = self.place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(release / name, f"{target}.dpkg-new")
            Path(f"{target}.dpkg-new").rename(target)
        for path in [*self.place.rglob("*")]:
            if path.is_file() and path.relative_to(self.place) not in wanted:
                path.unlink()  # byte code as well


class UpgradedNode:
    """A node of a lab, what runs on it, and every job that was ever begun there."""

    def __init__(self, site: Site, package: Package) -> None:
        self.site = site
        self.gpus = site.gpus
        self.name = site.node
        self.package = package
        self.journal = Journal(site.gpus.cluster.lab / "journal")
        self.begun: dict[int, int] = {}  # GPUs by job
        package.place.mkdir()
        self.journal.clear()

    def begin(self, devices: int, script: str = "") -> int:
        """Submit a job that writes into the journal what it has."""
        job = self.site.submit(devices, f"{NAMED}{self.journal.around(script)}")
        self.site.wait_launched(job)
        self.begun[job] = devices
        return job

    def install_hooks(self) -> str:
        """Put the hooks of the package in force; return the name of their version."""
        words = [sys.executable, "-c", INSTALL_HOOKS, str(self.package.place), CONFIG]
        done = self.gpus.cluster.run_in(self.name, words)
        assert done.returncode == 0, done.stdout + done.stderr
        return os.readlink(self.gpus.cluster.path_in(self.name, f"{FOLDER}/{CURRENT}"))

    def held(self) -> dict[str, str]:
        """Return the token of each lock."""
        return {name: record.token for name, record in self.gpus.locks(self.name).items()}

    def check_step(self, daemon: Daemon, jobs: Sequence[int]) -> None:
        """Let short jobs come and go beside those that run, and look at everything."""
        before = self.held()
        wave = [self.begin(number % 2) for number in range(WAVE)]
        daemon.goes_round()
        for job in wave:
            self.site.wait_over(job)
        daemon.goes_round()
        assert self.held() == before, daemon.said()
        assert self.site.in_service()
        for job in jobs:
            self.site.wait_running(job)
        counted = totals(self.gpus, self.name)
        assert [key for key in counted if key.startswith("claims_")] == ["claims_granted"]
        assert not [key for key in counted if key.startswith("reaped_")]


@contextmanager
def upgraded_node(node: UpgradedNode) -> Generator[Daemon]:
    """Install the older release on a node, and run its gpulockd."""
    assert node.install_hooks()
    program = GPULOCKD.format(str(node.package.place))
    with daemon_on(node.gpus, node.name, program=program) as daemon:
        yield daemon


def upgrade_and_go_back(node: UpgradedNode, trees: Path) -> None:
    """Upgrade a node and take that back, step by step, while jobs on its cards and others run.

    The jobs that begin under one release end under each of both. A job without GPUs has hooks as
    well: those fill up what the node's cards do not.
    """
    older, newer, cards = trees / "older", trees / "newer", node.site.count
    write_this_release(older, "0.0.9")
    write_newer_release(newer)
    node.package.put(older)
    gates = [gate_file(node.gpus, f"gate{number}") for number in range(3)]
    with upgraded_node(node) as daemon:
        waits = [f"until [ -e {gate} ]; do sleep 2; done" for gate in gates]
        jobs = {
            number: [
                node.begin(devices, waits[number])
                for devices in [1] * (cards // 4) + [0] * ((JOBS - cards // 4 * 2) // 2)
            ]
            for number in (0, 1)
        }
        for job in [*jobs[0], *jobs[1]]:
            node.site.wait_running(job)
        node.check_step(daemon, [*jobs[0], *jobs[1]])

        for release, gate, version in (
            (newer, 0, "99.0-"),
            (older, 1, ""),
        ):
            here = [job for one in list(jobs) for job in jobs[one]]
            node.package.put(release)
            node.check_step(daemon, here)  # gpulockd and hooks are the other release's
            assert node.install_hooks().startswith(version)
            node.check_step(daemon, here)  # only gpulockd is
            daemon.stop()
            daemon.restart()
            node.check_step(daemon, here)
            gates[gate].touch()  # these began under the other release
            for job in jobs.pop(gate):
                node.site.wait_over(job)
            if gate == 0:
                jobs[2] = [node.begin(devices, waits[2]) for devices in (1, 0)]
                for job in jobs[2]:
                    node.site.wait_running(job)

        gates[2].touch()
        for job in jobs.pop(2):
            node.site.wait_over(job)
        wait_until(lambda: not node.held(), why="all locks to be gone")
        daemon.goes_round()
        check_journal(node, daemon)


def check_journal(node: UpgradedNode, daemon: Daemon) -> None:
    """Each job has had what it asked for, alone, and is in the history once."""
    holds = node.journal.holds()
    assert doubles(holds) == []
    assert len(holds) == len(node.begun), "one ran twice"
    assert {hold.job: len(hold.devices) for hold in holds} == node.begun
    claims = sorted(int(line["job_id"]) for line in daemon.history())
    assert claims == sorted(job for job, devices in node.begun.items() if devices)
    assert {line["how"] for line in daemon.history()} == {"epilog"}


@pytest.mark.parametrize(
    "scheduler", [SGE, SELECTING, *([SLURM] * SOAK)], indirect=True, scope="module"
)
def test_jobs_go_on_while_gpulock_is_upgraded_and_downgraded(site: Site, tmp_path: Path) -> None:
    with site.with_hooks_below(FOLDER, JOBS + 20):
        upgrade_and_go_back(UpgradedNode(site, Package(tmp_path / "package")), tmp_path)
