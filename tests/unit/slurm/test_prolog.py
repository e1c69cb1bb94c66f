# SPDX-License-Identifier: Apache-2.0
"""The Prolog: what is locked and noted, by Slurm's choice and by gpulock's."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from tests.support.clock import VirtualClock
from tests.support.slurm_site import RUN, UID, Site
from tests.support.trees import BOOT, HOST_NS, OTHER_BOOT, bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


def test_slurms_own_positions_are_locked_and_noted(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    assert site.prolog(12, "1,3") == RUN
    assert site.locks() == site.granted() == [bus(1), bus(3)]
    note = site.note()
    assert (note.positions, [d.index for d in note.devices]) == (["1", "3"], [1, 3])
    assert [d.uuid for d in note.devices] == ["GPU-00000001-aaaa", "GPU-00000003-aaaa"]
    assert (note.uid, note.restart, note.binds) == (UID, 0, "")
    assert site.claims() == [note.token]
    assert capfd.readouterr() == ("", "")


def test_the_record_says_whose_it_is(site: Site) -> None:
    site.prolog(12, "1", SLURM_JOB_RESTART_COUNT="2", SLURM_HET_JOB_ID="11")
    found = site.holder(1)
    assert found.key() == ("slurm", "lab", "n1", "12", "")
    assert (found.user, found.uid, found.queue) == ("alice", UID, "main")
    assert (found.restart, found.het_leader, found.positions) == (2, "11", "1")
    assert (found.boot_id, found.pid_ns, found.node) == (BOOT, HOST_NS, os.uname().nodename)
    assert (found.minors, found.uuids) == (("1",), ("GPU-00000001-aaaa",))


def test_position_minor_and_index_are_not_mixed_up(site: Site) -> None:
    site.shuffled()
    assert site.prolog(12, "1,3") == RUN
    assert site.locks() == [bus(1), bus(2)]
    note = site.note()
    assert [d.id for d in note.devices] == [bus(2), bus(1)]  # in Slurm's order
    assert ([d.index for d in note.devices], note.positions) == ([2, 1], ["1", "3"])
    assert [site.holder(n).minor_of(bus(n)) for n in (1, 2)] == ["1", "0"]


def test_a_prolog_waits_while_gpulockd_compares_a_changed_gres_conf(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = site.root / "gres.conf"
    conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n")
    site.map("0", "1", "2", "3", gres_conf=str(conf))
    with conf.open("a") as file:
        file.write("# a comment\n")
    paused: list[float] = []

    def compare(seconds: float) -> None:
        paused.append(seconds)
        site.map("1", "0", "2", "3", gres_conf=str(conf))

    monkeypatch.setattr(time, "sleep", compare)
    assert site.prolog(12, "0") == RUN
    assert (site.granted(), len(paused)) == ([bus(1)], 1)


def test_a_gres_conf_that_nobody_compares_sends_the_job_back_and_drains_no_node(
    site: Site,
) -> None:
    conf = site.root / "gres.conf"
    conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n")
    site.map("0", "1", "2", "3", gres_conf=str(conf))
    site.set(SLURM_WAIT="0.1")
    conf.write_text("NodeName=other Name=gpu File=/dev/nvidia0\n")
    assert site.prolog(12, "0") == RUN
    assert "changed" in site.refused(12, "unknown")
    assert (site.locks(), site.drained()) == ([], [])


def test_where_gpulock_chooses_the_positions_are_only_counted(site: Site) -> None:
    site.set(**OURS)
    (site.state / "slurm-map").unlink()
    assert site.prolog(12, "2,3") == RUN
    assert site.locks() == site.granted() == [bus(0), bus(1)]
    assert site.prolog(13, "2") == RUN
    assert site.granted(13) == [bus(2)]
    assert site.note().positions == ["2", "3"]


@pytest.mark.parametrize("keys", [{}, OURS])
def test_a_job_without_gpus_is_noted_as_such_and_needs_no_driver(
    site: Site, keys: dict[str, str]
) -> None:
    site.set(**keys, DRIVER_ROOT=str(site.root / "no-driver"))
    (site.state / "slurm-map").unlink()
    assert site.prolog(12, None) == RUN
    assert (site.granted(), site.locks(), site.claims()) == ([], [], [])


def test_the_first_hook_of_a_boot_may_be_of_a_job_without_gpus(site: Site) -> None:
    for boot_id in (BOOT, OTHER_BOOT):
        site.proc.boot(boot_id)
        for folder in (site.lock, site.records):  # /run is empty after a boot
            shutil.rmtree(folder, ignore_errors=True)
        assert site.prolog(12, None) == RUN
        assert (site.notes(), site.granted()) == (["n1.12"], [])
        assert site.prolog(13) == RUN
        assert site.granted(13) == site.locks() == [bus(0), bus(1)]


def test_everybody_may_read_what_a_task_needs_whatever_slurmds_umask(site: Site) -> None:
    old = os.umask(0o077)
    try:
        assert site.prolog() == RUN
    finally:
        os.umask(old)
    claim = site.records / "claims" / site.note().token
    lock = site.lock / "locks" / bus(0)
    for folder in (site.records, site.records / "tasks", claim.parent, claim, lock.parent, lock):
        assert folder.stat().st_mode & 0o777 == 0o755, folder
    for file in (site.records / "tasks/n1.12", claim / "record", lock / "owner"):
        assert file.stat().st_mode & 0o777 == 0o644, file


def test_two_nodes_of_one_machine_share_its_devices(site: Site, clock: VirtualClock) -> None:
    """Both parts of job 12 run here: each has its own lock, note and epilog."""
    assert site.prolog(12, "0") == RUN
    assert site.prolog(12, "1", SLURMD_NODENAME="n2") == RUN
    assert (site.granted(), site.granted(slurmd="n2")) == ([bus(0)], [bus(1)])
    assert site.prolog(13, "0", SLURMD_NODENAME="n2") == RUN
    assert site.note(13, "n2").refused != ""
    site.epilog(12)
    assert (site.locks(), site.notes()) == ([bus(1)], ["n2.12", "n2.13"])
    site.epilog(12, SLURMD_NODENAME="n2")
    assert (site.locks(), site.claims()) == ([], [])
