# SPDX-License-Identifier: Apache-2.0
"""Clean hand-over: is a device's memory given back before the next job gets it?

Hot, loaded where LEFTOVER_PROCESSES is not off. The exporter's sample counts only if it is newer
than the moment when no process had the device open; the lock notes that moment as `quiet`. A device
whose memory stays in use without a process is quarantined, at most half of a node's GPUs; a further
one stays in service, and that is told: a faulty exporter cannot take a node down. Without an
exporter, the check of open files has decided, and the record says so.
"""

import os
import time

from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, card_bus_id
from gpulock.store import atomic, kv, quarantine
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpulock.node.devices import Device

CLEAN, DIRTY, WAIT, OTHER_PROCESSES, NO_SAMPLE = "clean", "dirty", "wait", "others", "untold"
MIB = 1 << 20
PERIODS = 2  # of the exporter, that an epilog waits for its next look
PAUSE = 0.05  # seconds
BY, CAUSE = "gpulock", "memory"  # in the note of the quarantine
EXPORTER_MEMORY_CAUSES = (
    "xid",
    "ecc",
    "lost",
    CAUSE,
)  # causes in a note that an exporter's word alone brought about
QUARANTINE_LIMIT_REACHED = (
    "the exporter reports more than half of this node as faulty: check it, or quarantine by hand"
)
MEMORY_CHECK_PENDING = "its memory is checked first"
MEMORY_NOT_REPORTED = " (no exporter reported its memory)"


def judge_memory_sample(
    seen: "sample.DeviceSample | None",
    quiet: float,
    now: float,
    oldest: float,
    limit: int,
    listing: float,
) -> str:
    """Return what the exporter's last look at a device says; times are CLOCK_BOOTTIME seconds.

    `quiet` is when nobody had it open any more, `oldest` the age at which a look is believed no
    more, `limit` the bytes that the driver may keep for itself. Processes are listed seldom, every
    `listing` seconds: a list from before the device was quiet has the job's own, which are gone.
    Memory of one that is listed afterwards is a service's, which may stay. In a coherent card's the
    kernel keeps pages of its own.
    """
    if seen is None or seen.looked is None or now - seen.looked > oldest:
        return NO_SAMPLE
    if seen.looked <= quiet:
        return WAIT
    if seen.memory_used is None:
        return NO_SAMPLE
    if seen.coherent:
        return CLEAN
    if seen.memory_used <= limit:
        return CLEAN
    if seen.listed is not None and seen.listed <= quiet:
        return WAIT if now - seen.listed <= listing + oldest else DIRTY
    return OTHER_PROCESSES if seen.processes else DIRTY


class Handover:
    """Devices of one node on their way from a claim to the next, by one sample.

    `away` has what it put out of service, by id, and why; `spared` what it did not.
    """

    __slots__ = ("_found", "_node", "_now", "away", "spared")

    def __init__(self, node: Node) -> None:
        self.away: dict[str, str] = {}
        self.spared: dict[str, str] = {}
        self._node = node
        self._now = clock_boottime()
        settings = node.settings
        self._found = sample.read_sample(
            settings.exporter_dir, self._now, node.boot_id, settings.max_sample_age
        )

    def memory_state(self, device: str, quiet: float) -> str:
        """Return what the sample says of a device that is quiet since then."""
        settings = self._node.settings
        seen = self._found.devices.get(device.partition(SHARE)[0]) if self._found else None
        limit = settings.leftover_memory * MIB
        oldest, listing = settings.max_sample_age, settings.process_period
        return judge_memory_sample(seen, quiet, self._now, oldest, limit, listing)

    def reason_to_keep_lock(self, lock: Lock, quiet: "float | None" = None) -> str:
        """Return why a quiet device's lock stays for now, or nothing: then it may be freed.

        Without `quiet` the moment is the one noted in the lock, where there is one. A device
        that is not clean goes to quarantine first; where that fails its lock stays. On an
        exporter's word half of a node goes out and not more, so a further one is freed. Gate held.
        """
        record = lock.owner
        if record is None or record.boot_id != self._node.boot_id:
            return ""  # a reboot empties every memory
        if SHARE in lock.id and (lock.mps or self._is_shared(lock.id)):
            return ""  # what is in use is its neighbours', or of the MPS that ends after it
        if quiet is None:
            quiet = self._quiet_since(lock.id)
        state = self.memory_state(lock.id, quiet)
        if state == WAIT:
            self._note_quiet_since(lock.id, quiet)
            return MEMORY_CHECK_PENDING
        return self._quarantine_device(lock) if state == DIRTY else ""

    def _is_shared(self, share: str) -> bool:
        """Return whether others hold shares of the same card; what cannot be seen is not there."""
        card = share.partition(SHARE)[0]
        try:
            names = os.listdir(self._node.store.locks_dir)
        except OSError:
            return False
        return any([name != share and name.startswith(f"{card}{SHARE}") for name in names])

    def release_reason(self, lock: Lock, how: str) -> str:
        """Return how a lock is said to be freed: also what is not well with its memory."""
        if lock.id in self.spared:
            return f"{how} ({self.spared[lock.id]})"
        untold = self.memory_state(lock.id, 0.0) == NO_SAMPLE
        return f"{how}{MEMORY_NOT_REPORTED}" if untold else how

    def _quiet_since(self, device: str) -> float:
        """Return since when a device is quiet: as noted in its lock, or now."""
        try:
            text = atomic.read_text(f"{self._node.store.locks_dir}/{device}/quiet")
            return min(float(text), self._now)
        except (OSError, ValueError):
            return self._now

    def _note_quiet_since(self, device: str, quiet: float) -> None:
        """Note in a lock since when its device is quiet; where that fails it is the next time."""
        path = f"{self._node.store.locks_dir}/{device}/quiet"
        try:
            atomic.replace_file(path, f"{quiet!r}\n".encode())
        except OSError:
            return

    def _quarantine_device(self, lock: Lock) -> str:
        """Quarantine a device whose memory is in use though nobody is there; return what failed."""
        assert lock.owner is not None
        assert self._found is not None
        device = lock.id.partition(SHARE)[0]
        used = (self._found.devices[device].memory_used or 0) // MIB
        reason = f"{CAUSE}: {used} MiB stay in use after job {lock.owner.job()}"
        try:
            state_dir, folder = self._node.settings.state_dir, quarantine.QUARANTINE
            out = quarantine.list_noted_devices(state_dir, folder)
            if device in out:
                return ""  # that note stands
            if not self._may_quarantine(card_bus_id(device), out):
                self.spared[lock.id] = f"{reason}; {QUARANTINE_LIMIT_REACHED}"
                return ""
            quarantine.write_device_note(state_dir, folder, device, BY, reason)
            self.away[lock.id] = reason
        except (OSError, kv.MalformedError, Refusal) as fault:
            return f"{reason}, and it cannot be quarantined: {fault}"
        return ""

    def _may_quarantine(self, bus: str, out: list[str]) -> bool:
        """Return whether one more card may be out of service for what an exporter said."""
        state_dir, folder = self._node.settings.state_dir, quarantine.QUARANTINE
        notes = {name: quarantine.read_device_note(state_dir, folder, name) for name in out}
        found = self._node.known_devices()
        cards = max(self._node.settings.expected_gpus, len({device.bus for device in found}))
        return may_quarantine_card(bus, cards_out_by_exporter(notes, found), cards)


def note_set_by_exporter(note: "Mapping[str, str]") -> bool:
    """Return whether a device is out for what an exporter said."""
    reasons = note.get("reason", "").split("; ")
    return note.get("by") == BY and any(
        [word.partition(":")[0] in EXPORTER_MEMORY_CAUSES for word in reasons]
    )


def cards_out_by_exporter(
    notes: "Mapping[str, Mapping[str, str]]", found: "Iterable[Device]"
) -> set[str]:
    """Return the bus ids of what is out of service for what an exporter said: by notes, or MIG."""
    out = {card_bus_id(name) for name, note in notes.items() if note_set_by_exporter(note)}
    return out | {device.bus for device in found if device.withheld}


def may_quarantine_card(bus: str, out: set[str], cards: int) -> bool:
    """Return whether a card may go out of service on the exporter's word alone.

    As the policy has it (docs/quarantine.md): half of a node's `cards` at most, of one that one.
    """
    return bus in out or len(out) < max(1, cards // 2)


def wait_for_memory_sample(
    node: Node, devices: "Iterable[str]", quiet: float, deadline: Deadline
) -> Handover:
    """Wait for the exporter's next look at devices that are quiet: two of its periods at most."""
    limit = deadline.sooner(PERIODS * node.settings.sample_period)
    names = list(devices)
    while True:
        found = Handover(node)
        states = [found.memory_state(name, quiet) for name in names]
        if WAIT not in states or limit.left() <= 0:
            if DIRTY in states:
                node.devices_if_driver()  # how many cards there are, which the gate's holder asks
            return found
        time.sleep(min(PAUSE, limit.left()))
