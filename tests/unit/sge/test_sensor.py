# SPDX-License-Identifier: Apache-2.0
"""The load sensor: execd's protocol, and never more than a prolog could give."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.deadline import Deadline
from gpulock.install.hook_script import render_python_hook
from gpulock.sge import sensor, verdict
from gpulock.store.event_kinds import TIMEOUT
from gpulock.store.events import note_event
from gpulock.store.gate import Gate
from tests.support.claims import ask
from tests.support.fake_mps import leave_mps
from tests.support.faults import raising
from tests.support.jobs import Site
from tests.support.locks import spoil_record
from tests.support.trees import BOOT, Box, bus, record, soon

ROOT = Path(__file__).parents[3]
NODE = os.uname().nodename
HOST = "node1.example.org"  # as execd names this host, whatever the kernel does


def values(site: Box) -> dict[str, str]:
    lines = [line.split(":") for line in sensor.sensor_report_lines(site.config(), HOST)]
    assert {line[0] for line in lines} <= {HOST}
    return {name: value for _, name, value in lines}


def hold(site: Box, count: int, share: bool = False, **changes: object) -> str:
    node = site.node()
    node.name = NODE
    fields: dict[str, object] = {"node": NODE, "token": "", "devices": (), "add_grp_id": 0}
    one = record(**{**fields, "sid": 500, **changes})
    return claim_devices(
        node, one, ClaimRequest(count, share=share), lambda: verdict.make_sge_judge(node), soon()
    ).owner.token


Answer = Callable[[str, str], str]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have execd write lines to the sensor of these settings; give what reaches the pipe."""

    def run(config: str, lines: str) -> str:
        pipe = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", io.TextIOWrapper(pipe))
            assert sensor.main({"HOST": HOST}, config) == 0
            return pipe.getvalue().decode()

    return run


def test_each_line_is_answered_until_quit(site: Site, answer: Answer) -> None:
    lines = answer(site.config(), "\n\nquit\n\n").splitlines()
    assert (lines.count("begin"), lines.count("end")) == (2, 2)
    assert f"{HOST}:gpu:4" in lines


def test_execd_says_the_hosts_name_and_the_kernel_where_it_does_not(site: Site) -> None:
    """qmaster takes no value under a name without the domain that it knows the host by."""
    script = render_python_hook("prolog/sge-sensor", sys.executable, str(ROOT), site.config())
    for told, name in ({"HOST": "n1.example.org"}, "n1.example.org"), ({}, os.uname().nodename):
        done = subprocess.run(
            [sys.executable, "-IS", "-c", script],
            env={**told, "HOSTNAME": "other"},
            input="\nquit\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        lines = done.stdout.splitlines()
        assert {line.partition(":")[0] for line in lines[1:-1]} == {name}


def test_while_something_is_stale_only_what_is_free_is_offered(site: Site) -> None:
    site.proc.shepherd(500, site.root)
    hold(site, 1)
    hold(site, 2, job_id="13", pid=501, sid=501)
    found = values(site)
    assert (found["gpu"], found["gpu.free"]) == ("1", "1")


def test_a_draining_lock_is_not_counted_by_qmaster(site: Site) -> None:
    site.proc.shepherd(500, site.root)
    site.node().store.mark_draining(hold(site, 1))
    assert values(site)["gpu"] == "3"


def test_a_card_that_is_missing_or_out_is_not_offered(site: Site) -> None:
    site.settings["EXPECTED_GPUS"] = "5"
    (site.state / "quarantine").mkdir(exist_ok=True)
    (site.state / "quarantine" / bus(3)).write_text("")
    found = values(site)
    assert (found["gpu"], found["gpu.quarantined"]) == ("3", "2")


def test_a_run_without_a_scheduler_is_not_in_qmasters_books(site: Site) -> None:
    site.proc.add(500)
    hold(site, 1, scheduler="process")
    assert values(site)["gpu"] == "3"


def no_driver(site: Box) -> None:
    shutil.rmtree(site.driver)


def lost_locks(site: Box) -> None:
    (site.state / "boot_id").write_text(BOOT)


def garbage_record(site: Box) -> None:
    spoil_record(site.node().store, "garbage")  # at which every claim stops


def no_boot_id(site: Box) -> None:
    ask(site, 1)
    (site.records / "boot_id").unlink()
    (site.records / "boot_id").mkdir()


@pytest.mark.parametrize("spoil", [no_driver, lost_locks, garbage_record, no_boot_id])
def test_a_node_in_doubt_offers_nothing(site: Site, spoil: Callable[[Box], None]) -> None:
    spoil(site)
    assert values(site) == {"gpu": "0", "gpu.free": "0"}


def test_settings_that_are_wrong_offer_nothing_and_do_not_end_it(
    site: Site, answer: Answer
) -> None:
    said = answer(site.config(EXPECTED_GPUS="many"), "\n")
    assert said == f"begin\n{HOST}:gpu:0\n{HOST}:gpu.free:0\nend\n"


def test_a_fault_nobody_foresaw_does_not_end_the_sensor(
    site: Site, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor, "read_sensor_rows", raising(KeyError("x")))
    assert answer(site.config(), "\n\n").count(f"{HOST}:gpu:0\n") == 2


def test_shares_are_counted_by_their_places_and_a_shared_card_is_no_whole_one(site: Site) -> None:
    site.settings |= {"SGE_COMPLEXES": "gpu gpu_share=share", "SHARES": "2:4 3:8"}
    assert (values(site)["gpu"], values(site)["gpu_share"]) == ("4", "12")
    site.proc.shepherd(500, site.root)
    hold(site, 1, share=True, job_id="1")
    assert (values(site)["gpu"], values(site)["gpu_share"]) == ("3", "12")
    note = site.state / "quarantine" / bus(2)
    note.parent.mkdir(exist_ok=True)
    note.touch()
    assert values(site)["gpu_share"] == "8"  # none of the card that the job is on
    note.unlink()
    hold(site, 3, job_id="2")  # all other cards, one with places among them
    taken = {name.partition(".share")[0] for name in site.locks()}
    assert len(taken) == 4
    assert (values(site)["gpu"], values(site)["gpu_share"]) in (("0", "3"), ("0", "7"))


def test_of_cards_that_two_complexes_count_only_the_free_are_offered(site: Site) -> None:
    for number, model in enumerate(("NVIDIA A100-SXM4-80GB",) * 3 + ("NVIDIA H200",)):
        site.gpu(bus(number), number, Model=model)
    site.settings["SGE_COMPLEXES"] = "gpu gpu_a=model:a100* gpu_h=model:h200"
    site.proc.shepherd(500, site.root)
    hold(site, 2)  # qmaster's books have it under one of the complexes, and it counts on all
    found = values(site)
    assert (found["gpu"], found["gpu_a"], found["gpu_h"]) == ("2", "1", "1")
    site.settings["SGE_COMPLEXES"] = "gpu_a=model:a100* gpu_h=model:h200"
    found = values(site)
    assert (found["gpu_a"], found["gpu_h"]) == ("3", "1")


def test_a_card_whose_mps_ends_is_not_offered(site: Site) -> None:
    site.settings |= {"SGE_COMPLEXES": "gpu gpu_share=share", "SHARES": "2:4 3:4"}
    leave_mps(site.node(), bus(2), 1001)
    assert (values(site)["gpu"], values(site)["gpu_share"]) == ("3", "4")


def test_while_the_gate_is_shut_nothing_is_offered_and_all_once_it_opens(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor, "GATE_PATIENCE", 0.01)
    site.proc.shepherd(500, site.root)
    hold(site, 1)
    store = site.node().store
    with Gate(store, Deadline(1)):
        assert values(site)["gpu"] == "4", "nobody has waited in vain yet"
        note_event(store.path, TIMEOUT, "alice:13")
        assert values(site) == {"gpu": "0", "gpu.free": "0"}
    assert values(site)["gpu"] == "4"


@pytest.mark.parametrize("what", ["blocks", "files"])
def test_a_lock_dir_without_room_offers_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    site.proc.shepherd(500, site.root)
    hold(site, 1)
    left = {"blocks": (4096, 4096, 1000, 15, 15, 1000, 500, 500, 0, 255)}
    left["files"] = (4096, 4096, 1000, 900, 900, 1000, 15, 15, 0, 255)

    def statvfs(_: object) -> os.statvfs_result:
        return os.statvfs_result(left[what])

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert values(site) == {"gpu": "0", "gpu.free": "0"}
    left[what] = (4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)  # a tmpfs without limits
    assert values(site)["gpu"] == "4"
