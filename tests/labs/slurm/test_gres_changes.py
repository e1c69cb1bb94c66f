# SPDX-License-Identifier: Apache-2.0
"""gres.conf changes on a node that serves jobs: what is not of this node changes nothing."""

from __future__ import annotations

import pytest

from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import started
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_slurm
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
_RIGHTS = "-all,+sys_ptrace,+dac_override,+dac_read_search,+kill,+setgid"
AS_UNIT = ("setpriv", "--no-new-privs", f"--bounding-set={_RIGHTS}", "--inh-caps=-all")


def said(gpus: Gpulock) -> str:
    return (gpus.slurm.path_in(NODE, "/var/lib/gpulock") / "slurm-map").read_text()


def granted(gpus: Gpulock) -> str:
    """Return the minor of the device of a new job of one GPU, which is ended."""
    job = started(gpus, NODE, "--gres=gpu:1")
    (record,) = gpus.locks(NODE).values()
    assert record.job_id == str(job)
    gpus.slurm.scancel(job)
    gpus.slurm.wait_settled(job)
    return "".join(record.minors)


@pytest.mark.short
def test_another_order_is_the_map_once_slurmd_was_started_anew_and_a_comment_stops_no_job(
    slurm_gpus: Gpulock,
) -> None:
    """With no more rights than gpulockd's unit gives it on such a node."""
    by_slurm(slurm_gpus, extra=SLURM_CONF, order={NODE: (3, 1, 0, 2)})
    slurm = slurm_gpus.slurm
    place = slurm.lab / "etc/gres.conf"
    text = place.read_text()
    try:
        with daemon_on(slurm_gpus, NODE, *AS_UNIT) as daemon:
            before = said(slurm_gpus)
            other = "NodeName=slother[1-4] Name=gpu Type=h200 File=/dev/null"
            place.write_text(f"{text}# a comment\n{other}\n")
            assert granted(slurm_gpus) == "3"  # its Prolog waits for gpulockd
            assert "DRAIN" not in slurm.node_words(NODE)
            compared = said(slurm_gpus)
            assert compared != before, daemon.said()

            lines = text.splitlines(keepends=True)
            own = [line for line in lines if f"NodeName={NODE} " in line]
            others = [line for line in lines if line not in own]
            place.write_text("".join([*others, *reversed(own)]))
            wait_until(
                lambda: "restart slurmd" in daemon.said() or None,
                why="gpulockd to say that slurmd has not read it",
            )
            assert said(slurm_gpus) == compared
            slurm.stop_slurmd(NODE)
            slurm.start_slurmd(NODE)
            wait_until(lambda: said(slurm_gpus) != compared, why="another map")
            assert [line for line in said(slurm_gpus).splitlines() if line[0].isdigit()] == [
                *("0=2", "1=0", "2=1", "3=3")
            ]
            assert granted(slurm_gpus) == "2"
    finally:
        place.write_text(text)
    slurm.stop_slurmd(NODE)
    slurm.start_slurmd(NODE)
