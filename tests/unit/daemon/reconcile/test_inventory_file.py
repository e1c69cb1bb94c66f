# SPDX-License-Identifier: Apache-2.0
"""The inventory: of what an ordinary user wrote, only what the driver confirms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.inventory_file import InventoryPublisher, check_inventory
from gpulock.daemon.reconcile.reconcile import DaemonNode, DriverCard, ReconcileReport
from gpulock.node.device_list import driver_mig_instances
from gpulock.node.device_list import read_nvml_inventory as read_inventory
from gpulock.node.settings import Settings
from tests.support.journal import HeardJournal
from tests.support.trees import BOOT, NAME, OTHER_BOOT, Box, bus

CARDS = {bus(number): DriverCard(number, f"GPU-{number:08d}-aaaa") for number in range(2)}
NONE: dict[str, frozenset[str]] = {}
SPLIT = {bus(0): frozenset({"gi1.ci0"})}


def test_what_fits_is_published() -> None:
    told = {
        f"gpu.{bus(0)}.uuid": "GPU-00000000-aaaa",
        f"gpu.{bus(0)}.memory_mib": "32768",
        f"gpu.{bus(0)}.mig": "0",
        f"gpu.{bus(0)}.nvswitch": "1",
        f"link.{bus(0)}.{bus(1)}": "4",
    }
    assert check_inventory(told, CARDS, NONE) == (told, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"gpu.{bus(7)}.memory_mib", "32768"),
        (f"gpu.{bus(0)}.memory_mib", "much"),
        (f"gpu.{bus(0)}.memory_mib", "9" * 30),
        (f"gpu.{bus(0)}.mig", "2"),
        (f"gpu.{bus(0)}.uuid", "MIG-1234"),
        (f"gpu.{bus(0)}.uuid", "GPU-00000001-aaaa"),  # that is the other card
        (f"gpu.{bus(0)}.uuid", "GPU-1234"),
        (f"gpu.{bus(1)}.uuid", "GPU-" + "a" * 200),
        (f"gpu.{bus(0)}.colour", "green"),
        (f"gpu.{bus(0)}.gi1.ci0.uuid", "GPU-1234"),
        (f"link.{bus(0)}.{bus(7)}", "4"),
        (f"link.{bus(0)}.{bus(1)}", "-4"),
        (f"mig.{bus(0)}.gi1.ci0.uuid", "MIG-1234"),
        (f"mig.{bus(0)}.gi1.ci0.profile", "1g.5gb"),
        ("nothing", "at all"),
        ("..", ""),
    ],
)
def test_what_does_not_fit_is_left_out_and_told(key: str, value: str) -> None:
    pairs, wrong = check_inventory({key: value}, CARDS, NONE)
    assert (pairs, [*wrong]) == ({}, [key])


def test_a_uuid_is_taken_where_the_driver_does_not_tell_one() -> None:
    told = {f"gpu.{bus(0)}.uuid": "GPU-1234"}
    assert check_inventory(told, {bus(0): DriverCard(0, "")}, NONE)[0] == told
    other = {bus(0): DriverCard(0, ""), bus(1): DriverCard(1, "GPU-1234")}
    assert check_inventory(told, other, NONE)[0] == {}


def test_a_uuid_that_two_devices_have_is_neithers() -> None:
    told = {f"mig.{bus(n)}.gi1.ci0.uuid": "MIG-1234" for n in range(2)}
    told |= {f"gpu.{bus(n)}.mig": "1" for n in range(2)}
    split = {bus(n): frozenset({"gi1.ci0"}) for n in range(2)}
    pairs, wrong = check_inventory(told, CARDS, split)
    assert (pairs, len(wrong)) == ({f"gpu.{bus(n)}.mig": "1" for n in range(2)}, 2)


def test_a_card_with_instances_is_never_granted_whole() -> None:
    """The exporter lies, or is late: the driver has access files of an instance."""
    pairs, wrong = check_inventory({f"gpu.{bus(0)}.mig": "0"}, CARDS, SPLIT)
    assert (pairs, [*wrong]) == ({f"gpu.{bus(0)}.mig": "1"}, [f"mig {bus(0)}"])


def test_instances_are_told_by_their_access_files(tmp_path: Path) -> None:
    for name in ("gi1/ci0", "gi1/ci1", "gi9/ci0", "config/ci0", "gi1/access", "gi1/xx7"):
        (tmp_path / "capabilities/gpu1/mig" / name).mkdir(parents=True)
    assert driver_mig_instances(str(tmp_path), 0) == frozenset()
    assert driver_mig_instances(str(tmp_path), 1) == {"gi1.ci0", "gi1.ci1", "gi9.ci0"}


class Site:
    """A node with an exporter's folder, and what is said of it."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root / "node")
        self.exporter = self.box.root / "run-exporter"
        self.exporter.mkdir()
        self.box.lock.mkdir()
        self.journal = HeardJournal()
        self.chore = InventoryPublisher(self.journal)
        self.node = DaemonNode(Settings(dict(self.box.settings)), NAME)

    def tell(self, *lines: str, boot_id: str = BOOT) -> None:
        text = "\n".join(["gpulock-inventory 1", f"boot_id={boot_id}", *lines]) + "\n"
        (self.exporter / "inventory").write_text(text)

    def run(self) -> dict[str, str]:
        self.node.devices()
        self.chore.run(self.node, ReconcileReport([], []), 0.0)
        return read_inventory(str(self.box.lock), BOOT)

    def said(self) -> list[str]:
        return self.journal.said()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_was_told_in_another_boot_is_not_published(site: Site) -> None:
    site.tell(f"gpu.{bus(0)}.memory_mib=32768", boot_id=OTHER_BOOT)
    assert site.run() == {}


@pytest.mark.parametrize("kind", ["link", "fifo", "huge"])
def test_what_is_no_plain_short_file_is_not_read(site: Site, tmp_path: Path, kind: str) -> None:
    place = site.exporter / "inventory"
    if kind == "link":
        (tmp_path / "secret").write_text(f"gpulock-inventory 1\nboot_id={BOOT}\n")
        place.symlink_to(tmp_path / "secret")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        with place.open("w") as file:
            file.truncate(1 << 30)
    assert site.run() == {}
    assert len(site.said()) == 1


def test_a_thousand_wrong_entries_are_a_few_lines(site: Site) -> None:
    site.tell(*[f"gpu.0000:ff:{n:02x}.0.mig=1" for n in range(200)])
    site.run()
    assert len(site.said()) == 20


def test_behind_a_silent_driver_nothing_is_taken_back(site: Site) -> None:
    site.tell(f"gpu.{bus(0)}.memory_mib=32768")
    before = site.run()
    site.node.cards = {}
    site.chore.run(site.node, ReconcileReport([], []), 0.0)
    assert read_inventory(str(site.box.lock), BOOT) == before


def test_without_an_exporters_word_what_was_told_stands_and_goes_with_the_card(site: Site) -> None:
    part = f"mig.{bus(0)}.gi1.ci0"
    access = site.box.driver / "capabilities/gpu0/mig/gi1/ci0"
    access.mkdir(parents=True)
    (access / "access").write_text("")
    site.tell(f"gpu.{bus(0)}.mig=1", f"{part}.uuid=MIG-1234", f"gpu.{bus(1)}.mig=0")
    site.run()
    (site.exporter / "inventory").unlink()
    assert site.run()[f"{part}.uuid"] == "MIG-1234"
    (access / "access").unlink()
    access.rmdir()
    assert f"{part}.uuid" not in site.run()
    (site.box.driver / "gpus" / bus(0)).rename(site.box.root / "fell-out")
    assert site.run().keys() == {"boot_id", f"gpu.{bus(1)}.mig"}
    assert site.said() == []
