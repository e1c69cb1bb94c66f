# SPDX-License-Identifier: Apache-2.0
"""Ids that Open Cluster Scheduler grants (RSMAP): a job has just the GPUs that they are.

Only Open Cluster Scheduler has them, so conftest.py leaves these tests to its installations.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from gpulock.daemon.slots import rsmap
from gpulock.sge.card_map import MAP_NAME, format_card_map
from tests.labs.common.installed import gate_file
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.sge import test_install
from tests.labs.sge.bare_node import NODE
from tests.labs.sge.config import EXECHOST_VALUES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import on, said, stopped_queues, wait_said, waiting_for
from tests.labs.sge.lab import GridEngine

pytestmark = pytest.mark.lab
node = test_install.node  # a fixture
IDS = ("GPU1", "GPU2", "GPU3", "GPU4")
# The first id is the last of four GPUs, so that no order of ids says which one it is.
MAP = {card: 3 - n for n, card in enumerate(IDS)}
GRANTED = f"4({' '.join(IDS)})"
SHOW = "echo ids=$SGE_HGR_card mask=$CUDA_VISIBLE_DEVICES.\n"


@pytest.fixture
def cards(sge: GridEngine) -> Iterator[None]:
    """Give the node four ids beside its other consumables, and take them away again."""
    before = sge.qconf("-sc")
    sge.set_complex("card card RSMAP <= YES YES NONE 0")
    sge.set_exechost(NODE, f"slots=16,card={GRANTED},gpuj=8")
    yield
    sge.clear_jobs()
    sge.set_exechost(NODE, EXECHOST_VALUES)
    sge.load("-Mc", "complexes", before)


@pytest.fixture
def mapped(cards: None, gpus: Gpulock) -> Generator[Gpulock]:
    """Give a test a node with a map of its ids; `cards` is gone last."""
    gpus.configure(NODE, SGE_COMPLEXES="card")
    devices = [device.id for device in gpus.node(NODE).devices()]
    told = {("card", card): devices[n] for card, n in MAP.items()}
    gpus.sge.path_in(NODE, f"/var/lib/gpulock/{MAP_NAME}").write_text(format_card_map(NODE, told))
    yield gpus
    gpus.sge.clear_jobs()


def values(sge: GridEngine) -> dict[str, str]:
    """Return the complex_values of the node."""
    return rsmap.parse_complex_values(sge.qconf("-se", NODE))


def assert_own(text: str, count: int) -> list[str]:
    """Expect that the mask of a job is just its ids, by the map; return them."""
    ids = text.partition("ids=")[2].partition(" mask")[0].split()
    mask = text.partition("mask=")[2].partition(".")[0]
    assert len(ids) == count, text
    assert mask == ",".join(sorted(str(MAP[card]) for card in ids)), text
    return ids


def test_jobs_beside_each_other_have_the_gpus_of_their_ids(mapped: Gpulock) -> None:
    """Also where a job asks for one a slot, and where the ids of the first are free again."""
    sge, go = mapped.sge, gate_file(mapped, "go")
    devices = [device.id for device in mapped.node(NODE).devices()]
    script = SHOW + waiting_for(go)
    asked = {
        ("-l", "card=1"): 1,
        ("-pe", "smp", "2", "-l", "card=1"): 2,
        ("-hard", "-l", "card=1"): 1,
    }
    jobs = {sge.submit("glalice", *on(NODE, *a), stdin=script): n for a, n in asked.items()}
    told: list[str] = []
    for job, count in jobs.items():
        ids = assert_own(wait_said(mapped, job, "mask="), count)
        assert sorted(mapped.held_by(job)[NODE]) == sorted(devices[MAP[card]] for card in ids)
        told += ids
    assert sorted(told) == sorted(IDS)
    more = sge.submit("glbob", *on(NODE, "-l", "card=3"), stdin="true\n")
    assert sge.state(more) == "qw"
    go.touch()
    for job in (*jobs, more):
        sge.wait_done(job)
    mapped.wait_free()
    assert stopped_queues(mapped) == {}


def test_the_id_of_a_card_out_of_service_goes_to_no_job_and_comes_back(mapped: Gpulock) -> None:
    sge = mapped.sge
    others = {name: value for name, value in values(sge).items() if name != "card"}
    with daemon_on(mapped, NODE) as daemon:
        mapped.told(NODE, "quarantine", str(MAP["GPU2"]), "--reason", "XID 79")
        daemon.rounds_until(lambda: values(sge)["card"] == "3(GPU1 GPU3 GPU4)", "the id to leave")
        job = sge.submit("glalice", *on(NODE, "-l", "card=3"), stdin=SHOW)
        whole = sge.submit("glbob", *on(NODE, "-l", "card=4", "-o", "whole.out"), stdin=SHOW)
        sge.wait_settled(job)
        assert sorted(assert_own(said(mapped, job), 3)) == ["GPU1", "GPU3", "GPU4"]
        assert sge.state(whole) == "qw"
        mapped.told(NODE, "restore", str(MAP["GPU2"]))
        daemon.rounds_until(lambda: values(sge)["card"] == GRANTED, "the id to come back")
        sge.wait_done(whole)
    text = (sge.users["glbob"].home / "whole.out").read_text()
    assert sorted(assert_own(text, 4)) == sorted(IDS)
    assert {name: value for name, value in values(sge).items() if name != "card"} == others
