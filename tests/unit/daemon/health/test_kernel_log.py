# SPDX-License-Identifier: Apache-2.0
"""XIDs from the kernel's log: which records count, of which card, and where reading goes on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpulock.daemon.health.cards import NodeCards
from gpulock.daemon.health.findings import find_hardware_xids
from gpulock.daemon.health.kernel_log import KernelLog, count_record
from gpulock.node.devices import Device
from tests.support.health_site import Ward
from tests.support.trees import bus

CARD = "0000:b3:00.0"
XID = "NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
LOADED = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
PROBED = (
    r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has"
    r"\x0aNVRM: fallen off the bus and is not responding to commands."
)


def counted(*texts: str, priority: int = 3) -> dict[tuple[str, int], int]:
    """Return how many errors there were in these records."""
    counts = NodeCards("")
    for sequence, text in enumerate(texts):
        count_record(counts, f"{priority},{sequence},5140900,-;{text}", 0.0)
    return {key: times for key, (times, _) in counts.xids.items()}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (XID, (CARD, 79)),
        ("NVRM: Xid (PCI:0000:B3:00 GPU-I:05): 13, pid=4711, Graphics Exception", (CARD, 13)),
        ("NVRM: Xid (PCI:10000:b3:00): 48, pid=4711", ("10000:b3:00.0", 48)),
        ("nvidia-nvswitch3: SXid (PCI:0000:b3:00.0): 20009, Non-fatal, Link 28", (CARD, 20009)),
        ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", (CARD, 79)),
        (PROBED, (CARD, 79)),
        (f"alice says {XID}", None),
        (f" {XID}", None),
        ("NVRM: Xid (PCI:0000:b3:00): many", None),
        ("NVRM: Xid (PCI:../../etc): 79", None),
        ("NVRM: GPU at PCI:0000:b3:00: GPU-7c1f1a2b", None),
        ("", None),
    ],
)
def test_an_error_of_the_driver_is_counted_of_its_card_and_what_only_looks_like_one_is_not(
    text: str, key: tuple[str, int] | None
) -> None:
    assert counted(text) == ({key: 1} if key else {})


@pytest.mark.attack
def test_a_line_that_a_user_wrote_is_not_counted() -> None:
    """Tried: an XID written to /dev/kmsg, to put a GPU out of service.

    Stopped by: the kernel gives such a record another facility than its own.
    """
    assert counted(XID, priority=8 + 3) == {}


@pytest.mark.parametrize("record", ["", "3,4", "3,x,1,-;NVRM", " SUBSYSTEM=pci", "\0", "3;;"])
def test_a_record_that_makes_no_sense_is_passed_over(record: str) -> None:
    counts = NodeCards("")
    count_record(counts, record, 0.0)
    assert (counts.sequence, counts.loaded, counts.xids) == (-1, 0.0, {})


def test_a_card_that_fell_off_with_a_number_and_without_one_did_so_once() -> None:
    assert counted(XID, "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.") == {(CARD, 79): 1}


def test_what_was_before_the_driver_was_loaded_is_over() -> None:
    cards, devices = NodeCards(""), [Device(CARD, 0)]
    count_record(cards, f"3,1,5000000,-;{XID}", 2.0)
    assert cards.xids == {(CARD, 79): (1, 7.0)}
    assert [*find_hardware_xids(cards, devices)]
    assert not [*find_hardware_xids(cards, [Device(bus(0), 0)])], "of a card that is not here"
    count_record(cards, f"6,2,9000000,-;{LOADED}", 2.0)
    assert (cards.sequence, cards.loaded) == (2, 11.0)
    assert not [*find_hardware_xids(cards, devices)]
    count_record(cards, f"3,3,9500000,-;{XID}", 2.0)
    assert [*find_hardware_xids(cards, devices)]


def test_reading_goes_on_where_it_ended_and_after_a_restart_from_the_cursor(tmp_path: Path) -> None:
    log, counts, first = tmp_path / "kmsg", NodeCards(""), KernelLog()
    log.write_text(f"3,7,1,-;{XID}\n SUBSYSTEM=pci\n")
    first.read(str(tmp_path), counts)
    first.read(str(tmp_path), counts)
    with log.open("a") as file:
        file.write(f"3,8,2,-;{XID}\n")
    KernelLog().read(str(tmp_path), counts)
    first.read(str(tmp_path), counts)
    assert (counts.xids[CARD, 79][0], counts.sequence) == (2, 8)


def test_the_end_of_a_device_and_an_overwritten_record_end_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one gives a record a read, EPIPE for what was overwritten, EAGAIN at its end."""
    kernel, reader = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel.send(f"3,7,1,-;{XID}\n SUBSYSTEM=pci\n".encode())
    kernel.send(f"3,9,1,-;{'x' * 8000}\n".encode())
    kernel.send(b"3,10,1,-;\xff\n")
    reads, broken = os.read, [BrokenPipeError()]

    def read(fd: int, size: int) -> bytes:
        if broken:
            raise broken.pop()
        return reads(fd, size)

    reader.setblocking(False)
    monkeypatch.setattr(os, "open", lambda *_: os.dup(reader.fileno()))
    monkeypatch.setattr(os, "read", read)
    counts = NodeCards("")
    assert KernelLog().read(str(tmp_path), counts), "records were overwritten"
    assert (counts.xids[CARD, 79][0], counts.sequence) == (1, 7)
    kernel.close()
    reader.close()


def test_a_log_that_cannot_be_read_is_told_once_and_when_it_can_be_read_again(
    tmp_path: Path,
) -> None:
    ward = Ward(tmp_path)
    (ward.dev / "kmsg").rename(ward.dev / "away")
    ward.round(3)
    (ward.dev / "away").rename(ward.dev / "kmsg")
    ward.round(2)
    begun, over = ward.said()
    assert "XIDs are not known: the kernel's log cannot be read" in begun
    assert "no longer: XIDs are not known" in over


def test_counts_that_were_lost_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(f"3,7,1,-;{XID}\n")
    log, again = KernelLog(), NodeCards("")
    log.read(str(tmp_path), NodeCards(""))
    log.read(str(tmp_path), again)
    assert again.xids[CARD, 79][0] == 1
