# SPDX-License-Identifier: Apache-2.0
"""The Prolog: what is locked and noted, by Slurm's choice and by gpulock's, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import INVALID_REQUEST
from gpulock.hooks.frame import HookRun
from gpulock.slurm import note
from gpulock.slurm.prolog import GO_ON, NODE_BROKEN
from tests.support.clock import VirtualClock
from tests.support.slurm_site import OTHER_UID, RUN, UID, Site, freezer, row
from tests.support.trees import BOOT, HOST_NS, OTHER_BOOT, bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


def test_slurms_own_positions_are_locked_and_noted(
    site: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(HookRun, "log", lambda _, line: lines.append(line))
    assert site.prolog(12, "1,3") == RUN
    assert f"granted 1={bus(1)},3={bus(3)} in " in lines[-1]
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
    assert (found.boot_id, found.namespaces, found.node) == (BOOT, HOST_NS, os.uname().nodename)
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
    site: Site, clock: VirtualClock
) -> None:
    conf = site.root / "gres.conf"
    conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n")
    site.map("0", "1", "2", "3", gres_conf=str(conf))
    with conf.open("a") as file:
        file.write("# a comment\n")
    clock.then[1] = lambda: site.map("1", "0", "2", "3", gres_conf=str(conf))
    assert site.prolog(12, "0") == RUN
    assert (site.granted(), len(clock.sleeps)) == ([bus(1)], 1)
    with conf.open("a") as file:
        file.write("# another\n")
    assert site.prolog(13, "0") == RUN
    assert site.note(13).refused
    assert clock.slept == pytest.approx(15, abs=1)
    assert site.prolog(14, "GPU-00000002-aaaa") == RUN
    assert site.granted(14) == [bus(2)]
    assert clock.slept == pytest.approx(15, abs=1)


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


# --- where a device is held -----------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, OURS])
@pytest.mark.parametrize("what", ["daemon", "cgroup", "open", "marked"])
def test_a_second_prolog_waits_for_what_the_first_run_left_and_is_refused(
    site: Site, clock: VirtualClock, what: str, keys: dict[str, str]
) -> None:
    site.set(**keys)
    site.prolog()
    if what == "daemon":
        site.stepd(700, "12.extern")
    elif what == "cgroup":
        site.cgroup(freezer(), 900)
    elif what == "open":
        site.process(900, "python", fds={9: site.dev / "nvidia0"})
    else:
        site.left_by(900)
    assert site.prolog(12, "0,1", SLURM_JOB_RESTART_COUNT="1") == RUN
    assert ("700" if what == "daemon" else "900") in site.refused()
    assert clock.slept == pytest.approx(15)
    assert (bus(0) in site.locks(), site.holder(0).restart) == (True, 0)


def test_what_another_user_holds_under_the_same_id_stays_that_users(
    site: Site, clock: VirtualClock
) -> None:
    """slurmctld lost its state and gave the id again (docs/facts/slurm.md, job ids)."""
    site.hold(0, job_id="12", uid=OTHER_UID)
    note.write_task_note(site.node().store, note.TaskNote("n1", "12", OTHER_UID, 1))
    assert site.prolog(12, "0") == RUN
    site.refused()
    assert (site.holder(0).uid, site.holder(0).token) == (OTHER_UID, "t7")
    site.set(**OURS)
    assert site.prolog(12, "0") == RUN
    assert site.granted() == [bus(1)]


@pytest.mark.parametrize("keys", [{}, {**OURS, "EXPECTED_GPUS": "1"}])
def test_a_device_that_is_held_is_waited_for_and_then_the_job_is_refused(
    tmp_path: Path, clock: VirtualClock, keys: dict[str, str]
) -> None:
    site = Site(tmp_path, 1, **keys)
    site.prolog(7, "0")
    assert site.prolog(12, "0") == RUN
    assert "job 7" in site.refused()
    assert clock.slept == pytest.approx(15)
    assert clock.sleeps == sorted(clock.sleeps[:-1]) + clock.sleeps[-1:]
    assert (len(clock.sleeps) < 20, max(clock.sleeps) <= 2) == (True, True)
    assert site.claims() == [site.note(7).token]


def test_how_long_is_waited_is_the_sites(site: Site, clock: VirtualClock) -> None:
    site.set(SLURM_WAIT="3")
    site.hold(0)
    site.prolog()
    site.refused()
    assert clock.slept == pytest.approx(3)


def test_the_gate_is_not_held_while_a_device_is_waited_for(site: Site, clock: VirtualClock) -> None:
    site.hold(0)
    clock.then[1] = lambda: site.prolog(13, "2")
    site.prolog(12, "0")
    assert site.granted(13) == [bus(2)]


def test_what_its_epilog_gave_up_is_taken_once_nobody_is_left(
    site: Site, clock: VirtualClock
) -> None:
    site.prolog(7, "0")
    site.process(900, "python")
    folder = site.cgroup(freezer(7), 900)
    site.epilog(7)
    assert site.holder(0).draining == 1
    assert site.prolog(12, "0") == RUN
    site.refused()
    (folder / "cgroup.procs").write_text("")
    site.prolog(8, "1")
    site.process(901, "python", fds={9: site.dev / "nvidia0"})  # CUDA opens what it can see
    site.started_with(901, SLURM_JOB_ID="8", SLURMD_NODENAME="n1")
    assert site.prolog(12, "0") == RUN
    assert site.granted() == [bus(0)]
    assert site.claims() == sorted([site.note(8).token, site.note().token])


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"boot_id": OTHER_BOOT}, True),
        ({"scheduler": "process", "pid": 4711, "start": 1}, True),
        ({"scheduler": "process", "pid": 1, "start": 1000}, False),
        ({"scheduler": "sge"}, False),
    ],
)
def test_others_are_judged_by_their_own_rules(
    site: Site, clock: VirtualClock, changes: dict[str, object], taken: bool
) -> None:
    site.hold(0, **changes)
    site.prolog(12, "0")
    assert (site.holder(0).token != "t7") is taken
    assert (site.note().refused == "") is taken


# --- a part of a GPU, which a job gets none of, and is told at once -------------------------------

MPS = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
REASON = "the job asks for a part of a GPU (gres/shard), which this node does not give"


def sharing(site: Site, *rows: str, shared: str = "shard") -> Site:
    """Let slurmd give out parts of this node's GPUs, and squeue know jobs."""
    site.map("0", "1", "2", "3", shared=shared)
    site.answers(*rows)
    return site


@pytest.mark.parametrize("mode", ["slurm", "gpulock"])
@pytest.mark.parametrize(
    "asked",
    [
        *({"Gres": f"gres{text}"} for text in (":shard:1", "/shard:1", ":shard", ":shard:a100:2")),
        *({f"tres-per-{what}": "gres:shard:1"} for what in ("job", "socket", "task")),
    ],
)
def test_a_shard_job_fails_with_the_reason_and_the_node_stays(
    site: Site, mode: str, asked: dict[str, str]
) -> None:
    site.set(SLURM_DEVICE_SELECTION=mode)
    sharing(site, row(12, **asked))
    assert site.prolog(12, "0") == RUN
    assert REASON in site.refused(12, INVALID_REQUEST, code=1)
    assert "--gres=gpu:1" in site.note().refused
    assert (site.locks(), site.drained()) == ([], [])


@pytest.mark.parametrize("gpus", ["0", None])
def test_an_mps_job_fails_with_the_reason_and_nobody_is_asked(site: Site, gpus: str | None) -> None:
    assert site.prolog(12, gpus, **MPS) == RUN
    assert "(gres/mps)" in site.refused(12, INVALID_REQUEST, code=1)
    assert (site.locks(), site.calls()) == ([], [])


def test_a_job_without_gpus_asks_nobody(site: Site) -> None:
    sharing(site)
    assert site.prolog(12, None) == RUN
    assert site.calls() == []


# --- typed GRES where gpulock chooses: of which kinds a job gets devices --------------------------


@pytest.fixture
def two_models(site: Site) -> Site:
    """The last two cards are H200."""
    for number, model in enumerate(("NVIDIA A100-SXM4-80GB",) * 2 + ("NVIDIA H200",) * 2):
        site.gpu(bus(number), number, Model=model)
    site.set(**OURS)
    return site


def test_of_positions_that_slurm_counted_the_same_kinds_are_given(two_models: Site) -> None:
    assert two_models.prolog(12, "2") == GO_ON
    assert [device.id for device in two_models.note(12).devices] == [bus(2)]
    assert two_models.prolog(13, "0,2") == GO_ON  # as many of each kind, whichever are free
    assert [device.id for device in two_models.note(13).devices] == [bus(0), bus(3)]


def lose_the_map(site: Site) -> None:
    (site.state / "slurm-map").unlink()


def lose_a_card(site: Site) -> None:
    site.map("0", "1", "7", "3")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lose_the_map, "slurm-map: [Errno 2]"),
        (lose_a_card, "the driver shows no GPU for Slurm's 2 (/dev/nvidia7)"),
    ],
)
def test_a_position_that_no_map_tells_gets_no_card_of_another_model(
    two_models: Site, what: Callable[[Site], None], told: str
) -> None:
    what(two_models)
    assert two_models.prolog(12, "2") == NODE_BROKEN
    assert two_models.locks() == []
    assert told in two_models.drained()[0]


@pytest.mark.parametrize("other", ["3g.40gb", "1g.10gb+me"])
def test_a_position_that_is_an_instance_gets_one_of_its_profile(site: Site, other: str) -> None:
    site.set(**OURS)
    site.map("0.gi1.ci0", "0.gi2.ci0", "1", "2", "3")
    one, two = site.mig()
    site.inventory(
        f"gpu.{bus(0)}.mig=1",
        *(f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1", f"mig.{bus(0)}.gi1.ci0.profile=3g.40gb"),
        *(f"mig.{bus(0)}.gi2.ci0.uuid=MIG-2", f"mig.{bus(0)}.gi2.ci0.profile={other}"),
    )
    assert site.prolog(12, "1") == GO_ON
    assert site.granted() == [one if other == "3g.40gb" else two]
    assert site.prolog(13, "2") == GO_ON
    assert site.granted(13) == [bus(1)]
