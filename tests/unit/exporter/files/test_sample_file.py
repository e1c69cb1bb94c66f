# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder and its files: what is written, and what an exporter reads back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gpulock_exporter.files.publish import LOCK, ExporterFolder, prune_finished_files
from gpulock_exporter.files.sample_file import restore_exporter_memory
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.collector_state import ExporterMemory

from gpulock.daemon.core import sample
from gpulock.daemon.core.sample import FINISHED, SAMPLE_LINE, parse_sample
from gpulock.errors import Refusal
from gpulock.node import device_list
from gpulock.node.devices import Device as DriverDevice
from gpulock.store import atomic
from gpulock.store.grants import FINISHED_CAP
from tests.support.exporter_nodes import EPOCH, Node, card, facts, instance, lock, uuid
from tests.support.faults import disk_full
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
processes=2 listed=1003.0 foreign=1 unseen=0 foreign_pids=77 \
c.energy=700.0,700.0,1003.0
device {bus(1)} uuid={uuid(1)} index=1 looked=1003.0
token {A} {bus(0)} since=1001.0 until=1003.0 busy=1.0 observed=2.0 seen=1003.0 idle=0.0 \
last_busy=1003.0 energy=600.0 memory_peak=10737418240 foreign=1.0 width=1.0 used=500,500 \
covered=1000,1000
"""


def unknown(number: int) -> DeviceTelemetry:
    """Return a card that tells nothing but who it is."""
    return DeviceTelemetry(bus(number), uuid(number), number)


def scene(tmp_path: Path) -> Node:
    """Return a node after three seconds: a claim, a process of a stranger and one of a service."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(77, "python", uids=(1000,) * 4)
    proc.add(78, "Xorg", uids=(0,) * 4)
    node = Node(proc=str(proc.root))
    node.facts = facts(lock(0, A, claimed_boottime=1001.0))
    node.tick(card(0, energy=100.0), unknown(1))
    node.tick(card(0, energy=400.0), unknown(1))
    node.tick(card(0, energy=700.0, processes={77: None, 78: None}), unknown(1))
    return node


def again(node: Node, now: float | None = None, boot: str = BOOT) -> ExporterMemory:
    """Return what an exporter that starts now remembers."""
    return restore_exporter_memory(
        parse_sample(node.text(), SAMPLE_LINE), boot, node.now if now is None else now
    )


def test_the_sample_is_as_the_table_says(tmp_path: Path) -> None:
    assert scene(tmp_path).text() == SAMPLE


def test_a_restarted_exporter_goes_on_where_it_was(tmp_path: Path) -> None:
    node = scene(tmp_path)
    node.tick(card(0), unknown(1))
    text = node.text()
    node.book.memory = again(node)
    assert node.text() == text
    node.tick(card(0, energy=1000.0), unknown(1))
    account = node.book.memory.ledger.accounts[A][bus(0)]
    assert (account.energy, account.observed) == (900.0, 4.0), "billed to who held it before"


def test_a_sample_that_could_not_be_replaced_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More was told since: counters that went on from it would fall below that."""
    folder = ExporterFolder(str(tmp_path))
    folder.write_sample(SAMPLE)
    assert folder.last() is not None
    monkeypatch.setattr(atomic, "replace_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        folder.write_sample(SAMPLE)
    assert folder.last() is None


def test_nothing_of_another_boot_or_of_the_future_is_remembered(tmp_path: Path) -> None:
    node = scene(tmp_path)
    for memory in (
        again(node, boot=OTHER_BOOT),
        again(node, now=10.0),
        restore_exporter_memory(None, BOOT, 1.0),
    ):
        assert (memory.totals.devices, memory.ledger.accounts, memory.sequence) == ({}, {}, 0)


def test_of_counters_those_are_remembered_that_this_release_understands() -> None:
    line = f"device {bus(0)} c.energy=1,2 c.ecc.sram=nan,2,3 c.pcie_replays=1,2,3,4 c.nvlink=1,2,3"
    found = parse_sample(f"{SAMPLE_LINE}\nboot_id={BOOT}\n{line}\n", SAMPLE_LINE)
    totals = restore_exporter_memory(found, BOOT, 1.0).totals.devices[bus(0)]
    assert list(totals.counters) == ["nvlink"]


def test_use_over_time_whose_two_lists_do_not_match_is_left_out() -> None:
    """An account goes on with those it has: of unequal ones none says which seconds it is of."""
    found = parse_sample(SAMPLE.replace("used=500,500", "used=500"), SAMPLE_LINE)
    account = restore_exporter_memory(found, BOOT, 2000.0).ledger.accounts[A][bus(0)]
    account.buckets.add(1004.0, 1.0, 1.0)
    assert account.buckets.covered == [0, 0, 1000]
    assert account.busy == 1.0


def test_uncorrected_errors_are_told_as_a_sum_and_corrected_ones_are_none(tmp_path: Path) -> None:
    node = Node(proc=str(FakeProc(tmp_path / "proc").root))
    kinds = {"corrected.dram": 9, "uncorrected.dram": 2, "uncorrected.sram": 1}
    node.tick(card(0, ecc=kinds), card(1, ecc={"corrected.dram": 9}))
    told = parse_sample(node.text(), SAMPLE_LINE).devices
    assert [told[bus(number)].uncorrected for number in range(2)] == [3, None]


def opened(root: Path) -> ExporterFolder:
    folder = ExporterFolder(str(root / "run"))
    folder.open()
    return folder


def test_what_is_left_of_a_claim_is_there_with_its_last_second(tmp_path: Path) -> None:
    node = scene(tmp_path)
    folder = opened(tmp_path)
    node.facts = facts()
    folder.write_finished(node.tick(card(0, energy=900.0)), BOOT, node.moment)
    found = sample.read_finished_claim(folder.path, A)
    assert found is not None
    account = found.tokens[A][bus(0)]
    assert (account.busy, account.energy, account.until) == (1.5, 800.0, 1004.0)
    assert (account.used, account.covered) == ((500, 500, 500), (1000, 1000, 1000))
    assert (found.boot_id, found.wall) == (BOOT, EPOCH + node.now)


def test_a_claim_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    folder, run = opened(tmp_path), tmp_path / "run"
    os.rmdir(run / "finished")
    with pytest.raises(FileNotFoundError):
        folder.write_finished({A: {}}, BOOT, Node().moment)
    folder.open()
    for left in (".sample.0a1b", f"{FINISHED}/.feed.0a1b"):
        (run / left).touch()  # an interrupted write leaves that
    folder.open()
    folder.write_finished({}, BOOT, Node().moment)
    assert [path.name for path in sorted(run.rglob("*"))] == ["finished", A]


def test_a_folder_that_was_removed_is_made_again_and_held(tmp_path: Path) -> None:
    path = str(tmp_path / "exporter")
    folder, other = ExporterFolder(path), ExporterFolder(path)
    folder.hold()
    shutil.rmtree(path)
    folder.hold()
    assert sorted(os.listdir(path)) == [FINISHED, LOCK]
    with pytest.raises(Refusal, match="another gpulock-exporter writes"):
        other.hold()
    shutil.rmtree(path)
    other.hold()
    with pytest.raises(Refusal, match="another gpulock-exporter writes"):
        folder.hold()
    other.release()
    folder.hold()
    folder.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(Refusal):
        ExporterFolder(str(tmp_path)).hold()
    assert (tmp_path / "precious").read_text() == "kept"


def test_the_oldest_claims_are_forgotten_when_nobody_fetches_them(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").touch()
        os.utime(tmp_path / f"{number}", (number, number))
    prune_finished_files(str(tmp_path), cap=11, drop=5)
    assert len(os.listdir(tmp_path)) == 10
    prune_finished_files(str(tmp_path), cap=10, drop=5)
    assert sorted(os.listdir(tmp_path)) == list("56789")
    assert FINISHED_CAP == 1000


# --- the inventory: what only NVML can tell of the devices, for the hooks ---------------------


def test_the_inventory_is_read_by_the_hooks(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    folder.open()
    cards = {
        bus(0): card(0, mig=False, links={bus(1): 4, bus(2): 4, "switch": 2, "junk": 9}),
        bus(1): card(1, mig=False, links={bus(0): 3}),
        bus(2): card(2, mig=True, links={bus(0): 4, "switch": 2}),
        f"{bus(2)}.gi0.ci0": instance(2, 0),
        f"{bus(2)}.gi2.ci0": instance(2, 2, uuid=""),
    }
    folder.write_inventory(cards, BOOT)
    pairs = device_list.read_nvml_inventory(str(tmp_path), BOOT)
    assert device_list.nvlink_counts(pairs) == {(bus(0), bus(1)): 3, (bus(1), bus(0)): 3}
    assert f"gpu.{bus(2)}.nvswitch" not in pairs, "in MIG mode its links are off"
    plain = [DriverDevice(bus(number), number) for number in range(3)]
    found = device_list.apply_nvml_inventory(plain, pairs)
    assert [one.id for one in found] == [bus(0), bus(1), f"{bus(2)}.gi0.ci0"]
    assert [one.switched for one in found] == [True, False, False]
    assert not any(one.withheld for one in found), "none is in MIG mode without an instance"
    assert (found[0].uuid, found[0].memory_mib) == (uuid(0), 81920)
    assert (found[2].profile, found[2].memory_mib) == ("1g.10gb", 10240)


def test_the_inventory_is_written_when_it_changes_or_is_gone(tmp_path: Path) -> None:
    folder = ExporterFolder(str(tmp_path))
    path = tmp_path / "inventory"
    linked = {bus(0): card(0, links={bus(1): 4}), bus(1): card(1, links={bus(0): 4})}
    folder.write_inventory(linked, BOOT)
    first = path.stat().st_ino
    folder.write_inventory(linked, BOOT)
    assert path.stat().st_ino == first
    path.unlink()
    folder.write_inventory(linked, BOOT)
    assert "link." in path.read_text()
    folder.write_inventory({bus(0): card(0)}, BOOT)
    assert "link." not in path.read_text()
