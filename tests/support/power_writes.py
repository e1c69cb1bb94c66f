# SPDX-License-Identifier: Apache-2.0
"""What the power is cut in: notes of devices, what the policy remembers, the history."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.daemon.health.recovery import note_comeback
from gpulock.daemon.history.files import FOLDER, name_month
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.slots import rsmap
from gpulock.store import grants, quarantine
from gpulock.store.owner import Owner
from gpulock.store.quarantine import POLICY, QUARANTINE, RESERVE
from tests.support.faults import raising
from tests.support.power_claims import Case, fresh_node, keep, used_node
from tests.support.power_log import recording
from tests.support.power_model import Remainder
from tests.support.power_node import PoweredNode
from tests.support.trees import OTHER_BOOT, bus, record

MONTH = name_month(time.time())
MANY = 9  # lines, of more than two pages together
GARBAGE = {"lines": b"", "half a line": b'{"version":1', "zeros": bytes(700)}


def quarantine_and_restore(root: Path, kept: bool) -> Case:
    """Take two GPUs out of a node that was never used, and put one back."""
    powered = fresh_node(root, kept)
    state = str(powered.box.state)
    with recording(*powered.roots()) as disk:
        powered.reconcile()  # the node's first: it makes the folders
        disk.tell("noting 0")
        quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "fan")
        disk.tell("out 0")
        disk.tell("noting 1")
        quarantine.write_device_note(state, QUARANTINE, bus(1), POLICY, "xid: 79")
        disk.tell("out 1")
        disk.tell("lifting 0")
        quarantine.remove_device_note(state, QUARANTINE, bus(0))
        disk.tell("back 0")
    return Case(disk.finish(), powered.check)


def quarantine_in_new_folder(root: Path, kept: bool) -> Case:
    """Take a GPU out where somebody removed the folder, and a round made it again."""
    powered = used_node(root, kept)
    state = str(powered.box.state)
    with recording(*powered.roots()) as disk:
        os.rmdir(f"{state}/{quarantine.FOLDER}")
        powered.reconcile()
        disk.tell("noting 0")
        quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "fan")
        disk.tell("out 0")
    return Case(disk.finish(), powered.check)


def reserve_and_unreserve(root: Path, kept: bool) -> Case:
    """Reserve a GPU of a node that was never used, and end that."""
    powered = fresh_node(root, kept)
    state = str(powered.box.state)
    with recording(*powered.roots()) as disk:
        powered.reconcile()
        quarantine.write_device_note(state, RESERVE, bus(0), "root", "driver test")
        disk.tell("reserved")
        disk.tell("ending")
        quarantine.remove_device_note(state, RESERVE, bus(0))
        disk.tell("unreserved")

    def check(left: Remainder) -> None:
        powered.restart(left)
        powered.reconcile()
        locked = [lock.id for lock in powered.locks()]
        assert locked in ([bus(0)], [])
        if left.told == frozenset({"reserved"}):
            assert locked == [bus(0)], "an acknowledged reserve is lost"
        if "unreserved" in left.told:
            assert locked == [], "an acknowledged end of a reserve is lost"

    return Case(disk.finish(), check)


def replaced_note(root: Path, kept: bool) -> Case:
    """Replace the note of a GPU that is out."""
    powered = used_node(root, kept)
    state, reasons = str(powered.box.state), ("xid: 79", "xid: 79; ecc: 1")
    quarantine.write_device_note(state, QUARANTINE, bus(0), POLICY, reasons[0])
    with recording(*powered.roots(), told=["out 0"]) as disk:
        quarantine.write_device_note(state, QUARANTINE, bus(0), POLICY, reasons[1])

    def check(left: Remainder) -> None:
        powered.check(left)
        note = quarantine.read_device_note(state, QUARANTINE, bus(0))
        assert note.get("reason") in reasons, "a policy that forgets why never ends it"

    return Case(disk.finish(), check)


def remembered(root: Path, kept: bool) -> Case:
    """Note that a GPU came back, and which ids of an RSMAP were taken out."""
    powered = used_node(root, kept)
    node, state = powered.node(), str(powered.box.state)
    first = {"card": {"1": "1"}}
    second = {"card": {"1": "1", "2": "2"}}
    cards = read_cards(state, node.boot_id)
    note_comeback(cards, bus(0))
    assert save_cards(state, cards)
    rsmap.save_withdrawn_ids(state, first)
    with recording(*powered.roots()) as disk:
        note_comeback(cards, bus(0))
        assert save_cards(state, cards)
        disk.tell("comeback")
        rsmap.save_withdrawn_ids(state, second)
        disk.tell("withdrawn")

    def check(left: Remainder) -> None:
        powered.restart(left)
        backs = read_cards(state, node.boot_id).backs
        assert len(backs) in ((2,) if "comeback" in left.told else (1, 2))
        found = rsmap.load_withdrawn_ids(state)
        assert found in ((second,) if "withdrawn" in left.told else (first, second))

    return Case(disk.finish(), check)


def earlier_claim(powered: PoweredNode, token: str) -> Owner:
    """Return the record of a claim of an earlier boot."""
    return record(
        token=token,
        node=powered.node().name,
        boot_id=OTHER_BOOT,
        devices=(bus(0), bus(1)),
        comment="x" * 200,
        claimed_at=time.time() - 7200,
        claimed_boottime=1.0,
    )


def owe(powered: PoweredNode, *tokens: str) -> list[str]:
    """Let claims of an earlier boot be without their lines; return what must come true."""
    node = powered.node()
    for token in tokens:
        grants.note_owed_line(node.settings.state_dir, node.store, earlier_claim(powered, token))
        powered.made.add(token)
    return [f"kept {token}" for token in tokens]


def write_history(root: Path, kept: bool, left: str = "") -> Case:
    """Write a batch of lines into a new file, or behind what is `left` in it."""
    powered = used_node(root, kept)
    due: list[str] = []
    if left:
        due = owe(powered, "before")
        powered.reconcile()
        with (powered.box.state / FOLDER / MONTH).open("ab") as file:
            file.write(GARBAGE[left])
    due += owe(powered, *[f"t{number}" for number in range(MANY)])
    powered.boot()
    with recording(*powered.roots(), told=due) as disk:
        powered.reconcile()
    return Case(disk.finish(), powered.check)


def behind_lines(root: Path, kept: bool) -> Case:
    """Write lines behind others."""
    return write_history(root, kept, "lines")


def behind_half_a_line(root: Path, kept: bool) -> Case:
    """Write lines behind one that was cut short."""
    return write_history(root, kept, "half a line")


def behind_zeros(root: Path, kept: bool) -> Case:
    """Write lines behind zeros."""
    return write_history(root, kept, "zeros")


class KilledError(BaseException):
    """An end that no handler sees."""


def killed_author(root: Path, kept: bool, place: str = MONTH) -> Case:
    """Kill the author at its first sync of the new file; another writes on."""
    powered = used_node(root, kept)
    due = owe(powered, "first")
    powered.boot()
    powered.claim(1)  # which begins the boot
    with recording(*powered.roots(), told=due) as disk:
        sync = os.fsync

        def kill(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{place}"):
                raise KilledError
            sync(fd)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(os, "fsync", kill)
            patch.setattr(os, "ftruncate", raising(KilledError))  # nor does it clean up
            powered.reconcile()
        powered.history = HistoryWriter(powered.told.append)
        owe(powered, "second")
        keep(powered, disk, "second")
        powered.reconcile()
    return Case(disk.finish(), powered.check)


def killed_before_name(root: Path, kept: bool) -> Case:
    """Kill the author before its new file has a name on the disk; another writes on."""
    return killed_author(root, kept, FOLDER)


def killed_and_nothing_new(root: Path, kept: bool) -> Case:
    """Kill the author before its lines are on the disk; another finds them."""
    powered = used_node(root, kept)
    due = owe(powered, "first")
    powered.boot()
    powered.claim(1)
    with recording(*powered.roots(), told=due) as disk:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(os, "fsync", raising(KilledError))
            patch.setattr(os, "ftruncate", raising(KilledError))
            powered.reconcile()
        powered.history = HistoryWriter(powered.told.append)
        powered.reconcile()
    return Case(disk.finish(), powered.check)
