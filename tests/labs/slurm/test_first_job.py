# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first protected job by `install slurm --write-conf`, and back to nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.labs.common.installed import CONFIG
from tests.labs.common.reaped import REPOSITORY
from tests.labs.killed import KILLED_INSTALLER, points_of_changes
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, run, settings

pytestmark = pytest.mark.lab
PREFIX: Final = "/var/lib/gpulock-hooks"  # private to each machine of the lab
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
    for node in gpus.nodes:
        gpus.command(node, "uninstall", "slurm", "--force", "--reason", "the test is over")


@pytest.mark.timeout(3600)
def test_an_installation_killed_at_a_change_is_taken_back(bare: Gpulock) -> None:
    """slurmctld answers as it did before, and slurm.conf is the same file to the byte."""
    conf = bare.slurm.lab / "etc/slurm.conf"
    before, answers = conf.read_bytes(), in_force(bare)
    words = ("install", "slurm", "--prefix", PREFIX, "--write-conf", "--installed-everywhere")
    for point in points_of_changes(said_by(bare, NODE, *words, "--dry-run")):
        line = [sys.executable, "-c", KILLED_INSTALLER, str(point), "--config", CONFIG, *words]
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


def test_slurm_conf_is_edited_in_force_and_put_back_byte_for_byte(bare: Gpulock) -> None:
    conf = bare.slurm.lab / "etc/slurm.conf"
    backup = conf.with_name("slurm.conf.before-gpulock")
    before, answers = conf.read_bytes(), in_force(bare)
    assert [key for key in MADE if re.search(rf"(?m)^{key}=", before.decode())] == []
    install = ("install", "slurm", "--prefix", PREFIX)
    for node in bare.nodes[1:]:
        assert "Prolog=" in said_by(bare, node, *install)

    refused = bare.command(NODE, *install, "--write-conf")

    assert refused.returncode != 0
    assert "--installed-everywhere" in refused.stderr
    assert (conf.read_bytes(), in_force(bare)) == (before, answers)

    said = said_by(bare, NODE, *install, "--write-conf", "--installed-everywhere", "--yes")

    assert "the trial job ran with CUDA_VISIBLE_DEVICES=" in said
    assert backup.read_bytes() == before
    now = in_force(bare)
    assert f"{PREFIX}/current/" in now
    for key, value in MADE.items():
        assert re.search(rf"(?m)^{key}=", conf.read_text())
        assert re.search(rf"(?m)^{key} *= .*{value}", now), now
    shown = run(bare, "-w", NODE, "--gres=gpu:2")
    assert shown["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "GPULOCK_DEVICES" in shown
    assert run(bare, "-w", NODE)["CUDA_VISIBLE_DEVICES"] == ""
    again = said_by(bare, NODE, *install, "--write-conf", "--installed-everywhere")
    assert "nothing to change" in again

    bare.wait_free()
    said_by(bare, NODE, "uninstall", "slurm")

    assert (conf.read_bytes(), in_force(bare)) == (before, answers)
    assert not backup.exists()
    assert "GPULOCK_DEVICES" not in run(bare, "-w", NODE, "--gres=gpu:1")
