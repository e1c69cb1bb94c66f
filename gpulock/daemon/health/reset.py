# SPDX-License-Identifier: Apache-2.0
"""Reset one GPU by `nvidia-smi --gpu-reset`, while nobody has it or what it is linked to.

A reset takes down the NVLinks of its peers, and the driver refuses it while the GPU is open. So the
GPU and its peers are reserved first, by locks of ours that no job gets past. A reset that is cut
short leaves them; gpulockd frees them when its process is gone and nobody has the GPUs open.
STATE_DIR/cards has when each GPU was reset in this boot: the proof that it was started again.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import Final

from gpulock.alloc import device_users
from gpulock.alloc.holders import lock_owner_words
from gpulock.alloc.node_view import check_no_mps_ends
from gpulock.alloc.reaper import free_locks, group_by_claim
from gpulock.daemon.core.journal import describe_exception
from gpulock.daemon.health.cards import RESET, note_card_step, read_cards, save_cards
from gpulock.daemon.idle.command import check_program_trust
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, UNKNOWN, Refusal, one_line
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import Device, card_bus_id, lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import boot, grants
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.repair import repair_locks

COMMENT: Final = "reset of "  # in the lock of a reset, before the bus id
RESET_SECONDS: Final = 180.0  # for nvidia-smi: a board with eight GPUs takes half a minute
PAUSE_SECONDS: Final = 30.0  # for the exporter to let the driver go
GATE_SECONDS: Final = 10.0
UNTOLD: Final = "no exporter told of it in this boot"
ANSWER_LENGTH: Final = 200  # characters of what nvidia-smi says
PATIENT: Final = ("nvidia-persistenced", "gpulock-exporter")  # open it, and make way for a reset
ENVIRON: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def linked_cards(node: Node, devices: Collection[Device], card: str) -> list[str]:
    """Return the bus ids of the cards that NVLink or an NVSwitch joins to one, or may join."""
    here = {device.bus for device in devices}
    if not are_links_known(node, card):
        return sorted(here - {card})
    switched = {device.bus for device in devices if device.switched}
    joined = {b for (a, b), count in node.links.items() if a == card and count}
    joined |= switched if card in switched else set()
    return sorted(joined & here - {card})


def are_links_known(node: Node, card: str) -> bool:
    """Return whether NVML told of a card in this boot, and so of its links."""
    return any(key.startswith(f"gpu.{card}.") for key in node.inventory)


def reserve_for_reset(node: Node, card: str, by: str) -> list[str]:
    """Lock a card and its link peers for its reset; return their ids.

    Raises Refusal, which names who holds one of them or has it open.
    """
    devices = node.devices()
    if card not in {device.bus for device in devices}:
        raise Refusal(BROKEN, f"the driver does not show {card}", "reboot the node")
    cards = [card, *linked_cards(node, devices, card)]
    doubt = (
        "" if are_links_known(node, card) else f"; the NVLinks of {card} are not known: {UNTOLD}"
    )
    with Gate(node.store, Deadline(GATE_SECONDS)):
        held = repair_locks(node.store, node.boot_id).held
        for lock in held.values():
            if any(lock_ids_overlap(lock.id, name) for name in cards):
                why = f"{describe_holder(lock, card)}{doubt}"
                raise Refusal(BUSY, why, f"gpulock why {lock.id}")
        check_no_mps_ends(node, cards)
        note = {"by": by, "reason": f"{COMMENT}{card}", "at": f"{time.time():.0f}"}
        record = boot.reserve_owner(card, note, node.boot_id, node.name)
        record.pid, record.start = os.getpid(), node.proc.start(os.getpid())
        record.devices = tuple(cards)
        grants.make_claim(node.store, record)
    if why := find_card_users(node, devices, cards):
        free_reset_locks(node, cards, by)
        raise Refusal(BUSY, f"{why}{doubt}", "end it, or wait for its end")
    return cards


def describe_holder(lock: Lock, card: str) -> str:
    """Return who holds a card that is to be reset, or a link peer of it."""
    record = lock.owner
    user = f" of {record.user}" if record else ""
    peer = "" if card_bus_id(lock.id) == card else f", a link peer of {card}"
    return f"{lock.id}{peer} is held by {lock_owner_words(lock)}{user}"


def find_card_users(node: Node, devices: Sequence[Device], cards: Sequence[str]) -> str:
    """Return which process has one of the cards open, as a clause, or nothing."""
    settings = copy.copy(node.settings)
    settings.allowed_processes = PATIENT
    scan = make_liveness_judge(node).scan
    files = device_users.OpenFiles(scan, devices, settings)
    for device in devices:
        if device.bus not in cards:
            continue
        for pid in files.pids_with_open(device.id):
            try:
                name = one_line(node.proc.status(pid).name)
            except (OSError, ValueError):
                name = "?"
            return f"process {pid} ({name}) has {device.id} open"
    blind = scan.blind or files.blind
    return f"who has it open cannot be seen: {blind}" if blind else ""


def is_reset_lock(lock: Lock) -> bool:
    """Return whether a lock is one of a reset."""
    record = lock.owner
    if record is None or record.scheduler != "admin":
        return False
    return record.pid > 0 and record.comment.startswith(COMMENT)


def free_reset_locks(node: Node, cards: Sequence[str], by: str) -> None:
    """End the reserves of a reset; raise Refusal or OSError."""
    with Gate(node.store, Deadline(GATE_SECONDS)):
        held = node.store.read_all_locks()
        ours = [held[name] for name in cards if name in held and is_reset_lock(held[name])]
        for same in group_by_claim(ours):
            free_locks(node, same, f"unreserved by {by}: the reset is over")


def free_cut_resets(node: Node, locks: Sequence[Lock]) -> list[str]:
    """Free what a reset left whose process is gone, where nobody has it open; return their ids.

    For a process that resets nothing now.
    """
    left = [lock for lock in locks if is_reset_lock(lock) and is_reset_over(node, lock)]
    if not left:
        return []
    names = [lock.id for lock in left]
    if find_card_users(node, node.devices(), names):
        return []
    free_reset_locks(node, names, "gpulock")
    return names


def is_reset_over(node: Node, lock: Lock) -> bool:
    """Return whether the process of a reset is gone, or is ours; in doubt it is not."""
    assert lock.owner is not None
    if lock.owner.pid == os.getpid():
        return True
    try:
        return not node.proc.running(lock.owner.pid, lock.owner.start)
    except (OSError, ValueError):
        return False


def reset_reserved(node: Node, cards: Sequence[str], by: str) -> str:
    """Reset the first of these reserved cards, and free them; return why that failed, or nothing.

    Raises Refusal or OSError where they cannot be freed.
    """
    try:
        failed = run_reset(node, cards[0])
    except Exception as fault:  # whatever it is, the cards are freed and it is told
        failed = describe_exception("the reset", fault)
    words = f"failed: {failed}" if failed else "done"
    with Gate(node.store, Deadline(GATE_SECONDS)):
        state_dir = node.settings.state_dir
        note_card_step(state_dir, node.boot_id, cards[0], RESET, f"{words} ({by})")
    free_reset_locks(node, cards, by)
    return failed


def run_reset(node: Node, card: str, seconds: float = RESET_SECONDS) -> str:
    """Reset a reserved card; return why that failed, or nothing. It may take `seconds` and more."""
    if why := check_program_trust(node.settings.nvidia_smi):
        return f"{node.settings.nvidia_smi} is not run: {why}"
    try:
        paused = pause_exporter(node)
        try:
            program = SchedulerProgram(node.settings.nvidia_smi, ENVIRON, "see dmesg")
            code, output = program.answer(["--gpu-reset", "-i", card], Deadline(seconds))
        finally:
            if paused:
                resume_exporter(node)
        if code:
            said = one_line(output.decode("utf-8", "replace").strip())[:ANSWER_LENGTH]
            return f"{program.name} ended with {code}: {said}"
        if not any(device.bus == card and not device.fault for device in node.devices()):
            return "the driver does not show it after the reset"
        note_reset(node, card, clock_boottime())
    except (Refusal, OSError) as fault:
        return fault.why if isinstance(fault, Refusal) else str(fault)
    return ""


def note_reset(node: Node, card: str, now: float) -> None:
    """Note that a card was reset; raise Refusal or OSError."""
    with Gate(node.store, Deadline(GATE_SECONDS)):
        cards = read_cards(node.settings.state_dir, node.boot_id)
        cards.of(card).reset = now
        save_cards(node.settings.state_dir, cards)


def pause_exporter(node: Node) -> bool:
    """Let the exporter that runs release the driver; return whether it is to be resumed.

    Raises Refusal, OSError. One that an administrator paused stays so.
    """
    told = sample.read_sample(node.settings.exporter_dir, clock_boottime(), node.boot_id)
    if told is None or told.fault == "paused":
        return False
    call_exporter(node, "pause")
    return True


def resume_exporter(node: Node) -> None:
    """Let the exporter use the driver again; where that fails its pause ends by itself."""
    try:
        call_exporter(node, "resume")
    except Refusal:
        return


def call_exporter(node: Node, act: str) -> None:
    """Let the running exporter pause or resume; raise Refusal where it cannot."""
    program = SchedulerProgram(sys.executable, ENVIRON, "see journalctl -u gpulock-exporter")
    words = ["-I", "-m", "gpulock_exporter.app.program", act, "--config", node.settings.path]
    code, output = program.answer(words, Deadline(PAUSE_SECONDS))
    if code:
        said = one_line(output.decode("utf-8", "replace").strip())[:ANSWER_LENGTH]
        raise Refusal(UNKNOWN, f"the exporter did not {act}: {said}", program.hint)
