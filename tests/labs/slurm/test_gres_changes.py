# SPDX-License-Identifier: Apache-2.0
"""gres.conf changes on a node that serves jobs: what is not of this node changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.labs.daemon.daemon_lab import Daemon, daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import started
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_slurm
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
_RIGHTS = "-all,+sys_ptrace,+dac_override,+dac_read_search,+kill,+setgid"
AS_UNIT = ("setpriv", "--no-new-privs", f"--bounding-set={_RIGHTS}", "--inh-caps=-all")


@contextlib.contextmanager
def gres_conf(gpus: Gpulock) -> Generator[Path]:
    """Give a test gres.conf, and have it again as it was."""
    place = gpus.slurm.lab / "etc/gres.conf"
    text = place.read_text()
    try:
        yield place
    finally:
        place.write_text(text)


def said(gpus: Gpulock) -> str:
    return (gpus.slurm.path_in(NODE, "/var/lib/gpulock") / "slurm-map").read_text()


def wait_renewed(gpus: Gpulock, daemon: Daemon, before: str) -> None:
    wait_until(lambda: said(gpus) != before or None, why="another map")


def append(place: Path) -> None:
    with place.open("a") as file:
        file.write("# a comment\nNodeName=slother[1-4] Name=gpu Type=h200 File=/dev/null\n")


@pytest.mark.short
def test_a_comment_and_a_line_for_another_node_stop_no_job(slurm_gpus: Gpulock) -> None:
    by_slurm(slurm_gpus, extra=SLURM_CONF, order={NODE: (3, 1, 0, 2)})
    with gres_conf(slurm_gpus) as place, daemon_on(slurm_gpus, NODE) as daemon:
        before = said(slurm_gpus)
        append(place)
        job = started(slurm_gpus, NODE, "--gres=gpu:1")  # its Prolog waits for gpulockd
        assert "DRAIN" not in slurm_gpus.slurm.node_words(NODE)
        (record,) = slurm_gpus.locks(NODE).values()
        assert (record.job_id, record.minors) == (str(job), ("3",))
        assert said(slurm_gpus) != before, daemon.said()


def test_another_order_is_the_map_once_slurmd_was_started_anew(slurm_gpus: Gpulock) -> None:
    """With no more rights than gpulockd's unit gives it on such a node."""
    by_slurm(slurm_gpus, extra=SLURM_CONF)
    slurm = slurm_gpus.slurm
    with gres_conf(slurm_gpus) as place, daemon_on(slurm_gpus, NODE, *AS_UNIT) as daemon:
        lines = place.read_text().splitlines(keepends=True)
        own = [line for line in lines if f"NodeName={NODE} " in line]
        others = [line for line in lines if line not in own]
        before = said(slurm_gpus)
        place.write_text("".join([*others, *reversed(own)]))
        wait_until(
            lambda: "restart slurmd" in daemon.said() or None,
            why="gpulockd to say that slurmd has not read it",
        )
        assert said(slurm_gpus) == before
        slurm.stop_slurmd(NODE)
        slurm.start_slurmd(NODE)
        wait_renewed(slurm_gpus, daemon, before)
        assert [line for line in said(slurm_gpus).splitlines() if line[0].isdigit()] == [
            *("0=3", "1=2", "2=1", "3=0")
        ]
        started(slurm_gpus, NODE, "--gres=gpu:1")
        (record,) = slurm_gpus.locks(NODE).values()
        assert record.minors == ("3",)
    slurm.stop_slurmd(NODE)
    slurm.start_slurmd(NODE)
