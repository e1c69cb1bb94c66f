# SPDX-License-Identifier: Apache-2.0
"""The shipped IDLE_COMMAND ends the one job, task or process that idles, and never another."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from gpulock.daemon.idle.command import ClaimFacts, build_idle_environment
from gpulock.store.owner import Owner
from tests.support.scripts import write_script
from tests.support.trees import Box, bus, record

SCRIPT = Path(__file__).parents[4] / "docs/examples/end-idle-job"


class Site(Box):
    """A node with schedulers' programs that write down what they were told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.binaries = root / "bin"
        self.binaries.mkdir()
        for name in ("scancel", "qdel"):
            self.program(name, "true")
        self.settings |= {"SLURM_BINARIES": str(self.binaries), "SGE_BINARIES": str(self.binaries)}

    def program(self, name: str, body: str) -> None:
        """Put a program in the place of a scheduler's own."""
        told = f'echo "{name} $@" >> "{self.root}/told"'
        write_script(self.binaries / name, f"{told}\n{body}")

    def kill(self, owner: Owner) -> int:
        """Let the script end a claim; return its exit code."""
        claim = ClaimFacts(owner, (bus(0),), 700.0, alive=True)
        environ = build_idle_environment(self.node().settings, claim, "kill", 4000.0)
        return subprocess.run([str(SCRIPT), "kill"], env=environ, check=False).returncode

    def told(self) -> list[str]:
        """Return the calls of programs that end something."""
        path = self.root / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("squeue")]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("12 12 N/A 1000 1", "scancel 12"),
        ("12 9 4 1000 1", "scancel 9_4"),
        ("12 9 4 1001 1", ""),
        ("12 9 4 1000 2", ""),
        ("13 9 4 1000 1", ""),
        ("", ""),
    ],
)
def test_a_slurm_job_is_cancelled_by_the_name_of_the_one_task(
    site: Site, row: str, told: str
) -> None:
    lines = ("7 7 N/A 0 0", row)
    rows = ["".join(f"{word:<20}" for word in line.split()) for line in lines]
    site.program("squeue", f"printf '%s\\n' '{rows[0]}' '{rows[1]}'")

    code = site.kill(record(scheduler="slurm", job_id="12", uid=1000, restart=1))

    assert (code == 0, site.told()) == (bool(told), [told] if told else [])


def test_a_process_is_told_to_end_and_one_that_took_its_number_is_not(site: Site) -> None:
    site.settings["PROC_ROOT"] = "/proc"
    child = subprocess.Popen(["sleep", "1000"])
    start = site.node().proc.start(child.pid)
    owner = record(scheduler="process", pid=child.pid, start=start, job_id=str(child.pid))
    try:
        assert site.kill(owner.copy(start=start + 1)) != 0
        assert child.poll() is None
        assert site.kill(owner) == 0
        assert child.wait(10) == -signal.SIGTERM
        assert site.kill(owner) != 0
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("name", ["squeue", "scancel"])
def test_a_slurmctld_that_is_away_is_a_failure(site: Site, name: str) -> None:
    site.program("squeue", "printf '%-20s' 12 12 N/A 1000 0")
    site.program(name, "exit 1")

    assert site.kill(record(scheduler="slurm", job_id="12", uid=1000, restart=0)) == 1


@pytest.mark.parametrize(("task", "words"), [("", "12"), ("3", "12 -t 3")])
def test_a_grid_engine_job_is_deleted_of_an_array_the_one_task(
    site: Site, task: str, words: str
) -> None:
    owner = record(scheduler="sge", job_id="12", task_id=task)

    assert (site.kill(owner), site.told()) == (0, [f"qdel {words}"])

    site.program("qdel", "exit 1")
    assert site.kill(owner) == 1
