# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder: what is written, who reads it, and what an exporter reads back."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.files.publish import (
    FINISHED_CAP,
    ExporterFolder,
    inventory_text,
    prune_finished_files,
)
from gpulock_exporter.files.sample_file import finished_text, restore_exporter_memory
from gpulock_exporter.metrics.collectors import collect_families
from gpulock_exporter.state.claim_accounting import LedgerAccount
from gpulock_exporter.state.collector_state import ExporterMemory
from gpulock_exporter.telemetry import DeviceTelemetry, Process, Xid
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpulock.node import devices, sample
from gpulock.node.devices import Device as DriverDevice
from gpulock.node.sample import SAMPLE_LINE, parse_sample
from gpulock.simulate.inventory import format_machine_inventory as simulated
from gpulock.simulate.machine import Machine
from gpulock.simulate.presets import PRESETS
from gpulock.store import atomic
from tests.support.exporter_nodes import EPOCH, Node, card, facts, full_card, instance, lock, uuid
from tests.support.few import FEW
from tests.support.trees import BOOT, OTHER_BOOT, FakeProc, bus

A = "aaaaaaaaaaaaaaaa"

SAMPLE = f"""\
gpulock-sample 1
boot_id={BOOT}
sequence=3
boottime=1003.0
wall=1700001003.0
looked=1003.0
driver=580.1
device {bus(0)} uuid={uuid(0)} index=0 looked=1003.0 utilization=0.5 memory_used=10737418240 \
memory_total=85899345920 busy=1.0 observed=2.0 last_busy=1003.0 energy=700.0 \
processes=1 listed=1003.0 foreign=1 unseen=0 foreign_pids=77 credit=0.0 \
c.energy=700.0,700.0,1003.0,300.0 x.79=1,1003.0
device {bus(1)} uuid={uuid(1)} index=1 looked=1003.0
token {A} {bus(0)} since=1001.0 until=1003.0 busy=1.0 observed=2.0 seen=1003.0 idle=0.0 \
last_busy=1003.0 energy=600.0 memory_peak=10737418240 foreign=1.0 width=1.0 used=500,500 \
covered=1000,1000
"""


def unknown(number: int) -> DeviceTelemetry:
    """Return a card that tells nothing but who it is."""
    return DeviceTelemetry(bus(number), uuid(number), number)


def scene(tmp_path: Path) -> Node:
    """Return a node after three seconds: a claim, a process of a stranger, an XID."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(77, "python", uids=(1000,) * 4)
    node = Node(proc=str(proc.root))
    node.facts = facts(lock(0, A, claimed_boottime=1001.0))
    node.tick(card(0, energy=100.0), unknown(1))
    node.tick(card(0, energy=400.0), unknown(1))
    node.tick(card(0, energy=700.0, processes=[Process(77)]), unknown(1), xids=[Xid(uuid(0), 79)])
    return node


def again(node: Node, now: float | None = None, boot: str = BOOT) -> ExporterMemory:
    """Return what an exporter that starts now remembers."""
    return restore_exporter_memory(
        parse_sample(node.text(), SAMPLE_LINE), boot, node.now if now is None else now
    )


def test_the_sample_is_as_the_table_says(tmp_path: Path) -> None:
    assert scene(tmp_path).text() == SAMPLE


def test_processes_are_told_as_of_when_they_were_listed(tmp_path: Path) -> None:
    node = scene(tmp_path)
    node.tick(card(0), unknown(1))
    seen = parse_sample(node.text(), SAMPLE_LINE).devices[bus(0)]
    assert (seen.looked, seen.listed, seen.processes) == (1004.0, 1003.0, 1)


def test_every_word_of_it_is_in_the_table_or_the_exporters_own() -> None:
    node = Node()
    node.facts = facts(lock(0, A))
    for _ in range(3):
        node.tick(full_card(0), xids=[Xid(uuid(0), 13)])
    for line in node.text().splitlines()[1:]:
        kind, *words = line.split(" ")
        keys = [word.partition("=")[0] for word in words if "=" in word]
        for key in keys if kind in ("device", "token") else []:
            own = kind == "device" and (key == "credit" or key[:2] in ("c.", "x."))
            assert (kind, key) in sample.TYPES or own


def test_a_restarted_exporter_goes_on_where_it_was(tmp_path: Path) -> None:
    node = scene(tmp_path)
    text = node.text()
    node.book.memory = again(node)
    assert node.text() == text


def test_a_restart_in_the_middle_of_a_claim_loses_nothing_but_its_own_time() -> None:
    whole, broken = Node(), Node()
    for node in (whole, broken):
        node.facts = facts(lock(0, A))
        for second in range(10):
            node.tick(card(0, energy=100.0 + 300 * second))
            if node is broken and second == 5:
                node.book = Node(again(node)).book
    kept = [node.book.memory.ledger.accounts[A][bus(0)] for node in (whole, broken)]
    assert kept[0] == kept[1]


def test_energy_goes_on_while_the_exporter_is_away_and_use_does_not() -> None:
    node = Node()
    node.facts = facts(lock(0, A))
    for second in range(3):
        node.tick(card(0, energy=100.0 + 300 * second))
    node.book = Node(again(node)).book
    node.tick(card(0, energy=100.0 + 300 * 100), seconds=98)
    account = node.book.memory.ledger.accounts[A][bus(0)]
    assert (account.energy, account.observed) == (30_000.0, 3.0)


def test_a_claim_that_went_while_the_exporter_was_away_is_finished_as_it_was() -> None:
    node = Node()
    node.facts = facts(lock(0, A))
    for _ in range(3):
        node.tick(card(0))
    node.book = Node(again(node)).book
    node.facts = facts()
    over = node.tick(card(0, busy=100.0, observed=100.0), seconds=100)
    assert over[A][bus(0)].observed == 2.0


def test_counters_that_were_told_and_could_not_be_written_begin_at_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> dict[str, float]:
        return {
            sample.name.removeprefix("gpulock_gpu_"): sample.value
            for metric in collect_families(node.snapshot())
            if metric.type == "counter"
            for sample in metric.samples
        }

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def look(second: int) -> None:
        seen = card(0, energy=100.0 + 300 * second, pcie_transmit=1000 * second, ecc={"a.b": 7})
        node.tick(seen, xids=[Xid(uuid(0), 79)])

    def start() -> None:
        memory = restore_exporter_memory(folder.last(), BOOT, node.now, folder.is_overtaken())
        node.book = Node(memory).book

    node, folder = Node(), ExporterFolder(str(tmp_path / "run"))
    folder.open()
    for second in range(3):
        look(second)
        folder.write_sample(node.text())
    start()
    look(3)
    before = told()
    assert (before["busy_seconds_total"], before["xid_errors_total"]) == (1.5, 4), "it goes on"

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "replace_file", full)
        for second in range(4, 8):
            look(second)
            with pytest.raises(OSError, match="No space"):
                folder.write_sample(node.text())
    lost = told()
    start()
    look(8)
    after = told()
    fell = {name for name in lost if after[name] < lost[name]}
    assert fell == {
        *("busy_seconds_total", "observed_seconds_total", "xid_errors_total"),
        "pcie_transmit_bytes_total",
    }
    assert after["pcie_transmit_bytes_total"] == 0
    assert (after["busy_seconds_total"], after["observed_seconds_total"]) == (0.5, 1.0)
    assert after["xid_errors_total"] == 1
    assert after["energy_joules_total"] == 100 + 300 * 8, "the driver counts it"
    assert after["ecc_errors_total"] == before["ecc_errors_total"]
    folder.write_sample(node.text())
    assert not folder.is_overtaken()


def test_nothing_of_another_boot_or_of_the_future_is_remembered(tmp_path: Path) -> None:
    node = scene(tmp_path)
    for memory in (
        again(node, boot=OTHER_BOOT),
        again(node, now=10.0),
        restore_exporter_memory(None, BOOT, 1.0),
    ):
        assert (memory.totals.devices, memory.ledger.accounts, memory.sequence) == ({}, {}, 0)


@pytest.mark.parametrize(
    "line",
    [
        f"device {bus(0)} looked=nan busy=1",
        f"device {bus(0)} looked=999999 busy=1 observed=1",
        f"device {bus(0)} looked=5 busy=9 observed=1 c.energy=1,2 x.y=1,2 x.7=nan,1 credit=a,b",
        f"token {A} {bus(0)} since=99999999 width=nan used=1,2",
        "gone",
        "gone x",
    ],
)
def test_a_sample_that_was_tampered_with_is_survived(line: str) -> None:
    memory = restore_exporter_memory(
        parse_sample(f"{SAMPLE_LINE}\nboot_id={BOOT}\n{line}\n", SAMPLE_LINE), BOOT, 1000
    )
    node = Node(memory)
    node.facts = facts(lock(0, A))
    for _ in range(3):
        node.tick(full_card(0))
    for totals in memory.totals.devices.values():
        assert totals.busy <= totals.observed


def test_files_are_written_whole_and_read_by_the_reader(tmp_path: Path) -> None:
    node = scene(tmp_path)
    folder = ExporterFolder(str(tmp_path / "run"))
    folder.open()
    folder.write_sample(node.text())
    found = sample.read_sample(folder.path, node.now, BOOT)
    assert found is not None
    assert found.tokens[A][bus(0)].energy == 600.0
    assert (found.devices[bus(0)].foreign_pids, found.devices[bus(1)].busy) == ((77,), None)
    again_ = folder.last()
    assert again_ is not None
    assert again_.sequence == found.sequence
    assert sorted(os.listdir(folder.path)) == ["finished", "sample"]


def test_what_is_left_of_a_claim_is_there_with_its_last_second(tmp_path: Path) -> None:
    node = scene(tmp_path)
    folder = ExporterFolder(str(tmp_path / "run"))
    folder.open()
    node.facts = facts()
    folder.write_finished(node.tick(card(0, energy=900.0)), BOOT, node.moment)
    found = sample.read_finished_claim(folder.path, A)
    assert found is not None
    account = found.tokens[A][bus(0)]
    assert (account.busy, account.energy, account.until) == (1.5, 800.0, 1004.0)
    assert account.means() == [0.5, 0.5, 0.5]
    assert (found.boot_id, found.wall) == (BOOT, EPOCH + node.now)


def test_a_token_that_could_be_a_path_is_written_nowhere(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path / "run"))
    folder.open()
    folder.write_finished({"../evil": {}, "": {}}, BOOT, Node().moment)
    assert os.listdir(tmp_path / "run" / "finished") == []
    assert not (tmp_path / "run" / "evil").exists()
    for token, name in (("../evil", "a"), ("feed", "a b"), ("feed", "a\nb")):
        text = finished_text(token, {name: LedgerAccount(1.0, 2.0)}, BOOT, Node().moment)
        assert "token" not in text


def test_a_claim_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path / "run"))
    folder.open()
    os.rmdir(tmp_path / "run" / "finished")
    with pytest.raises(FileNotFoundError):
        folder.write_finished({A: {}}, BOOT, Node().moment)
    folder.open()
    folder.write_finished({}, BOOT, Node().moment)
    assert os.listdir(tmp_path / "run" / "finished") == [A]


def test_what_an_interrupted_write_left_is_taken_away(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path / "run"))
    folder.open()
    for name in (".sample.0a1b", "finished/.feed.0a1b", "sample"):
        (tmp_path / "run" / name).touch()
    folder.open()
    assert sorted(os.listdir(tmp_path / "run")) == ["finished", "sample"]
    assert os.listdir(tmp_path / "run" / "finished") == []


def test_the_oldest_claims_are_forgotten_when_nobody_fetches_them(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").touch()
        os.utime(tmp_path / f"{number}", (number, number))
    prune_finished_files(str(tmp_path), cap=11, drop=5)
    assert len(os.listdir(tmp_path)) == 10
    prune_finished_files(str(tmp_path), cap=10, drop=5)
    assert sorted(os.listdir(tmp_path)) == list("56789")
    assert FINISHED_CAP == 1000


# --- inventory --------------------------------------------------------------------------------


def from_machine(machine: Machine) -> dict[str, DeviceTelemetry]:
    """Return the devices of a simulated machine as NVML would tell of them."""
    found: dict[str, DeviceTelemetry] = {}
    for index, gpu in enumerate(machine.present):
        links = {
            machine.gpus[b if machine.gpus[a] is gpu else a].bus: count
            for a, b, count in machine.links
            if gpu in (machine.gpus[a], machine.gpus[b])
            and not machine.gpus[a].fallen
            and not machine.gpus[b].fallen
        }
        found[gpu.bus] = DeviceTelemetry(
            gpu.bus,
            machine.uuid(gpu),
            index,
            memory_total=machine.card.memory_mib << 20,
            mig=bool(gpu.mig),
            links={**links, "switch": 6} if machine.nvswitch else links,
        )
        for part in gpu.mig:
            found[f"{gpu.bus}.{part.name}"] = DeviceTelemetry(
                gpu.bus,
                machine.instance_uuid(gpu, part),
                index,
                parent=gpu.bus,
                gi=part.gi,
                ci=part.ci,
                profile=part.profile,
                memory_total=part.memory_mib << 20,
            )
    return found


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_inventory_is_the_simulated_nodes_own(name: str) -> None:
    machine = PRESETS[name]
    found = from_machine(machine)
    links = {bus_: one.links for bus_, one in found.items() if one.links is not None}
    text = inventory_text(found, links, BOOT)
    assert sorted(text.splitlines()) == sorted(simulated(machine, BOOT).splitlines())


def test_the_inventory_is_read_by_the_hooks(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    folder.open()
    cards = {
        bus(0): card(0, mig=False, links={bus(1): 4, "switch": 2, "junk": 9}),
        bus(1): card(1, mig=False, links={bus(0): 3}),
        bus(2): card(2, mig=True, links={bus(0): 4}),
        f"{bus(2)}.gi1.ci0": instance(2, 1),
        f"{bus(2)}.gi2.ci0": instance(2, 2, uuid=""),
    }
    folder.write_inventory(cards, BOOT)
    pairs = devices.read_nvml_inventory(str(tmp_path), BOOT)
    assert devices.nvlink_counts(pairs) == {(bus(0), bus(1)): 3, (bus(1), bus(0)): 3}
    plain = [DriverDevice(bus(number), number) for number in range(3)]
    found = devices.apply_nvml_inventory(plain, pairs)
    assert [one.id for one in found] == [bus(0), bus(1), f"{bus(2)}.gi1.ci0"]
    assert [one.switched for one in found] == [True, False, False]
    assert (found[0].uuid, found[0].memory_mib) == (uuid(0), 81920)
    assert (found[2].profile, found[2].memory_mib) == ("1g.10gb", 10240)


def test_the_inventory_is_written_when_it_changes_or_is_gone(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    path = tmp_path / "inventory"
    folder.write_inventory({bus(0): card(0, links={bus(1): 4}), bus(1): card(1)}, BOOT)
    first = path.stat().st_ino
    folder.write_inventory({bus(0): card(0), bus(1): card(1)}, BOOT)  # links are told seldom
    assert path.stat().st_ino == first
    path.unlink()
    folder.write_inventory({bus(0): card(0), bus(1): card(1)}, BOOT)
    assert "link." in path.read_text()
    folder.write_inventory({bus(0): card(0)}, BOOT)
    assert "link." not in path.read_text()


# --- never below what was served --------------------------------------------------------------

FLOATS = st.one_of(st.none(), st.floats(), st.floats(0, 2))
COUNTERS = st.one_of(st.none(), st.floats(), st.floats(0, 1e6), st.integers(0, 2**65))
DEVICES = st.fixed_dictionaries(
    {
        "number": st.integers(0, 2),
        "uuid": st.sampled_from(["GPU-a", "GPU-b", "", "GPU-????", "bad uuid"]),
        "busy": FLOATS,
        "observed": FLOATS,
        "energy": COUNTERS,
        "pcie_transmit": COUNTERS,
        "nvlink_receive": COUNTERS,
    },
    optional={
        "ecc": st.dictionaries(st.sampled_from(["corrected.dram", "x y", "a."]), COUNTERS),
        "clock_reason_seconds": st.dictionaries(st.sampled_from(["sw_power_cap", "="]), COUNTERS),
        "gi": st.one_of(st.none(), st.integers(-1, 2)),
    },
)
TICKS = st.lists(
    st.tuples(
        st.lists(DEVICES, max_size=3), st.floats(0, 50), st.booleans(), st.sampled_from(["a", "b"])
    ),
    max_size=12,
)


def device(about: dict[str, Any]) -> DeviceTelemetry:
    fields = dict(about)
    number = fields.pop("number")
    part = fields.get("gi") is not None
    for name in ("ecc", "clock_reason_seconds"):
        values: dict[str, float | None] = fields.get(name, {})
        fields[name] = {key: value for key, value in values.items() if value is not None}
    return card(number, ci=0 if part else None, parent=bus(number) if part else "", **fields)


@settings(FEW, phases=(Phase.generate, Phase.shrink))  # to explain a failure takes a minute
@given(TICKS, st.randoms(use_true_random=False))
def test_no_frames_and_no_restarts_make_a_counter_fall(
    ticks: list[tuple[list[dict[str, Any]], float, bool, str]], chance: random.Random
) -> None:
    node = Node()
    served: dict[tuple[str, str], float] = {}
    for found, seconds, restart, token in ticks:
        node.facts = facts(lock(0, token * 16))
        frame = node.frame(*[device(about) for about in found])
        frame.boottime = chance.choice([frame.boottime, float("nan"), 0.0, 1e30])
        frame.xids = [Xid(name, 79) for name in ("GPU-a", "GPU-b", bus(0))]
        frame.driver = chance.choice(["", "1", "2"])
        node.now += seconds
        node.book.tick([frame], node.facts, node.moment)
        for metric in collect_families(node.snapshot()):
            for one in metric.samples:
                assert math.isfinite(one.value)
                if metric.type == "counter":
                    own = {name: of for name, of in one.labels.items() if name != "gpu"}
                    key = (one.name, str(own))
                    assert one.value >= served.get(key, 0), key
                    served[key] = one.value
        for accounts in node.book.memory.ledger.accounts.values():
            for account in accounts.values():
                assert 0 <= account.busy <= account.observed * (1 + 1e-9)
        if restart:
            node.book = Node(again(node)).book
