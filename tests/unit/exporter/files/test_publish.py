# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder: files are whole, and are written later where they could not be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gpulock_exporter.files.publish import (
    FINISHED_CAP,
    LOCK,
    ExporterFolder,
    prune_finished_files,
)

from gpulock.errors import Refusal
from gpulock.node import device_list, sample
from gpulock.node.devices import Device as DriverDevice
from gpulock.node.sample import FINISHED
from tests.support.exporter_nodes import EPOCH, Node, card, facts, instance, uuid
from tests.support.trees import BOOT, bus
from tests.unit.exporter.files.test_sample_file import A, scene


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
    (run / ".sample.0a1b").touch()  # an interrupted write leaves that
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
