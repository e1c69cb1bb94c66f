# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first protected job by `install slurm --write-conf`, and back to nothing.

slurm.conf is the administrator's: whatever they write between, and before or after an
uninstallation, is still there.
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
        words = ("uninstall", "slurm", "--force", "--reason", "the end")
        gpus.command(node, *words)


@pytest.mark.timeout(3600)
def test_an_installation_killed_at_a_change_is_taken_out_by_one_uninstallation(
    bare: Gpulock,
) -> None:
    """slurmctld answers as it did before, and slurm.conf is the same file to the byte."""
    conf = bare.slurm.lab / "etc/slurm.conf"
    before, answers = conf.read_bytes(), in_force(bare)
    words = ("install", "slurm", "--write-conf", "--installed-everywhere")
    for point in points_of_changes(said_by(bare, NODE, *words, "--dry-run")):
        line = [sys.executable, "-c", KILLED_ITEMS, str(point), "--config", CONFIG, *words]
        done = bare.slurm.run_in(NODE, line, env={"PYTHONPATH": str(REPOSITORY)}, seconds=120)
        assert done.returncode != 0
        said_by(bare, NODE, "uninstall", "slurm", "--write-conf")
        assert (conf.read_bytes(), in_force(bare)) == (before, answers), point


def said_by(gpus: Gpulock, node: str, *words: str, code: int = 0) -> str:
    """Return what a command of gpulock printed, which must end as it should."""
    done = gpus.command(node, *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_force(gpus: Gpulock) -> str:
    """Return what slurmctld goes by, without what changes by itself."""
    return re.sub(_CHANGING, "", gpus.slurm.scontrol("show", "config"))


def test_what_an_administrator_writes_into_slurm_conf_stays_and_slurmctld_lives(
    bare: Gpulock,
) -> None:
    """An uninstallation put the first file back, without 396 nodes, and slurmctld 22.05 ended."""
    slurm, conf = bare.slurm, bare.slurm.lab / "etc/slurm.conf"
    before, mode = conf.read_text(), conf.stat().st_mode
    assert [key for key in MADE if re.search(rf"(?m)^{key}=", before)] == []
    install = ("install", "slurm")
    write = (*install, "--write-conf", "--installed-everywhere")
    for node in bare.nodes[1:]:
        said = said_by(bare, node, *install, code=UNFINISHED)
        assert "installed, NOT in force: slurm.conf lacks" in said and "Prolog=" in said
    refused = bare.command(NODE, *install, "--write-conf")
    assert (refused.returncode, "--installed-everywhere" in refused.stderr) == (1, True)
    assert conf.read_text() == before

    said = said_by(bare, NODE, *write)

    assert "installed: slurm" in said
    now, written = in_force(bare), conf.read_text()
    assert (written.endswith(before), conf.stat().st_mode) == (True, mode)
    assert f"{PREFIX}/current/prolog/slurm" in now  # from 24.05 on it is Prolog[0]
    for key, value in MADE.items():
        assert re.search(rf"(?m)^{key}=", written)
        assert re.search(rf"(?m)^{key} *= .*{value}", now), now
    shown = run(bare, "-w", NODE, "--gres=gpu:2")
    assert shown["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "GPULOCK_DEVICES" in shown
    assert run(bare, "-w", NODE)["CUDA_VISIBLE_DEVICES"] == ""

    wait_until(lambda: slurm.slurmctld_pid() > 0, why="slurmctld to run")
    slurm.stop_slurmctld()
    racks = "NodeName=later[1-396] State=FUTURE CPUs=1  # the racks of March\n"
    conf.write_text(f"{written}{racks}")
    slurm.start_slurmctld()
    slurm.restart_slurmds()
    assert "nothing to change: slurm is in force" in said_by(bare, NODE, *write)
    line = f"Epilog={PREFIX}/current/epilog/slurm\n"
    conf.write_text(f"{written}{racks}".replace(line, ""))
    assert "somebody changed gpulock's block" in bare.command(NODE, *write).stderr
    conf.write_text(f"{written}{racks}")

    bare.wait_free()
    named = said_by(bare, NODE, "uninstall", "slurm", code=UNFINISHED)
    assert "Slurm still starts the hooks" in named and line in named
    assert conf.read_text() == f"{written}{racks}"
    assert "UP" in slurm.scontrol("ping")
    assert run(bare, "-w", NODE, "--gres=gpu:1")["GPULOCK_DEVICES"]
