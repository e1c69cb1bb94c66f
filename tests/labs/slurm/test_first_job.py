# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first protected job by the lines that are printed, and back to nothing.

slurm.conf is the administrator's: gpulock writes nothing into it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from gpulock.cli.admin.items import UNFINISHED
from gpulock.install.versions import FOLDER
from tests.labs.common.installed import CONFIG
from tests.labs.common.reaped import REPOSITORY
from tests.labs.killed import KILLED_ITEMS, points_of_changes
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, run, settings
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
PREFIX: Final = str(FOLDER)  # private to each machine of the lab
MADE: Final = {"PrologFlags": "Contain", "RequeueExit": "213"}
_CHANGING: Final = r"(?m)^(Configuration data as of|BOOT_TIME|NEXT_JOB_ID|Slurmctld\(.*) .*\n"


@pytest.fixture
def bare(slurm_gpus: Gpulock) -> Iterator[Gpulock]:
    """Give a test nodes that have settings, and a slurm.conf that has nothing for gpulock."""
    gpus = slurm_gpus
    gpus.prepare(hooks={}, prolog_flags="", gres="slurm")
    for node in gpus.nodes:
        gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="slurm"))
    yield gpus
    wait_until(lambda: gpus.slurm.slurmctld_pid() > 0, why="slurmctld to run")
    gpus.slurm.reconfigure()  # writes slurm.conf anew
    for node in gpus.nodes:
        gpus.command(node, "uninstall", "slurm")


@pytest.mark.timeout(3600)
def test_an_installation_killed_at_a_change_is_taken_out_by_one_uninstallation(
    bare: Gpulock,
) -> None:
    """slurmctld answers as it did before, and slurm.conf is the same file to the byte."""
    conf = bare.slurm.lab / "etc/slurm.conf"
    before, answers = conf.read_bytes(), in_force(bare)
    words = ("install", "slurm")
    for point in points_of_changes(said_by(bare, NODE, *words, "--dry-run")):
        line = [sys.executable, "-c", KILLED_ITEMS, str(point), "--config", CONFIG, *words]
        done = bare.slurm.run_in(NODE, line, env={"PYTHONPATH": str(REPOSITORY)}, seconds=120)
        assert done.returncode != 0
        said_by(bare, NODE, "uninstall", "slurm")
        assert (conf.read_bytes(), in_force(bare)) == (before, answers), point


def said_by(gpus: Gpulock, node: str, *words: str, code: int = 0) -> str:
    """Return what a command of gpulock printed, which must end as it should."""
    done = gpus.command(node, *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_force(gpus: Gpulock) -> str:
    """Return what slurmctld goes by, without what changes by itself."""
    return re.sub(_CHANGING, "", gpus.slurm.scontrol("show", "config"))


def test_the_printed_lines_put_the_hooks_in_force_until_they_are_taken_out(bare: Gpulock) -> None:
    conf = bare.slurm.lab / "etc/slurm.conf"
    before = conf.read_text()
    assert [key for key in MADE if re.search(rf"(?m)^{key}=", before)] == []
    for node in bare.nodes:
        said = said_by(bare, node, "install", "slurm", code=UNFINISHED)
        assert "installed, NOT in force: slurm.conf lacks" in said
    assert conf.read_text() == before
    lines = "".join(re.findall(r"(?m)^    \S.*\n", said))  # as they are pasted

    conf.write_text(f"{lines}{before}")
    bare.slurm.scontrol("reconfigure")

    for node in bare.nodes:
        assert "nothing to change: slurm is in force" in said_by(bare, node, "install", "slurm")
    now = in_force(bare)
    assert f"{PREFIX}/current/prolog/slurm" in now  # from 24.05 on it is Prolog[0]
    for key, value in MADE.items():
        assert re.search(rf"(?m)^{key} *= .*{value}", now), now
    shown = run(bare, "-w", NODE, "--gres=gpu:2")
    assert shown["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "GPULOCK_DEVICES" in shown
    assert run(bare, "-w", NODE)["CUDA_VISIBLE_DEVICES"] == ""

    bare.wait_free()
    named = said_by(bare, NODE, "uninstall", "slurm", code=UNFINISHED)
    assert "Slurm still starts the hooks" in named
    assert f"Epilog={PREFIX}/current/epilog/slurm\n" in named
    assert conf.read_text() == f"{lines}{before}"
    assert run(bare, "-w", NODE, "--gres=gpu:1")["GPULOCK_DEVICES"]
    bare.wait_free()
    conf.write_text(before)
    bare.slurm.scontrol("reconfigure")
    assert "uninstalled: slurm" in said_by(bare, NODE, "uninstall", "slurm")
