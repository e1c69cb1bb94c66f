# SPDX-License-Identifier: Apache-2.0
"""The state of each device, one of eight words: the one source for status, sensor and exporter.

Pure. The order of STATES is the order of precedence: a device that is missing is nothing else.
"""

from gpulock.node.devices import SHARE, Device, card_bus_id, lock_ids_overlap
from gpulock.store.locks import Lock
from gpulock.store.verdicts import DEAD, UNKNOWN, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.errors import Refusal
    from gpulock.store.reservations import Reservation

MISSING = "missing"
QUARANTINED = "quarantined"
STALE = "stale"
NOT_KNOWN = "unknown"
FOREIGN = "foreign"
HELD_IDLE = "held_idle"
HELD = "held"
FREE = "free"
STATES = (MISSING, QUARANTINED, STALE, NOT_KNOWN, FOREIGN, HELD_IDLE, HELD, FREE)
NO_INSTANCE = "it is in MIG mode, and no instance of it is known"


class DeviceState:
    """One device with its state and why, and its lock where it has one.

    `others` are the locks of a shared card, or of a card's instances, besides. `device` is None for
    a card that is only known to be missing. `noted` is the id under which one that is out of
    service was put out: its own, or its card's. `orphans` says which process has it open although
    the lock's owner is dead.
    """

    def __init__(
        self, name: str, device: "Device | None", lock: "Lock | None", state: str, reason: str
    ) -> None:
        self.id = name
        self.device = device
        self.lock = lock
        self.state = state
        self.reason = reason
        self.noted = ""
        self.orphans = ""
        self.reserved = False  # without a lock, for a user
        self.others: list[Lock] = []

    def lacks_instance(self) -> bool:
        """Return whether it is out of service for want of a known MIG instance alone."""
        return self.device is not None and self.device.withheld and not self.noted

    def locks(self) -> list[Lock]:
        """Return every lock on the device."""
        return [*([self.lock] if self.lock else []), *self.others]


class NodeView:
    """What the files say: `locks` by id, `quarantined` the reason by id, `verdicts` by token.

    None is not known. `reconciled` is when the verdicts were made (CLOCK_BOOTTIME seconds, also
    where they are old), `lost` the refusal where records of this boot were lost, `full` whether
    LOCK_DIR has room for no claim. `fault` is why nothing is granted: the boot's id, or a record,
    cannot be read.
    """

    def __init__(self) -> None:
        self.locks: "dict[str, Lock] | None" = None
        self.quarantined: "dict[str, str] | None" = None
        self.verdicts: "dict[str, Verdict] | None" = None
        self.reconciled: "float | None" = None
        self.lost: "Refusal | None" = None
        self.full = False
        self.fault = ""
        self.reservations: list[Reservation] = []  # of users, that are not over
        self.reserved: dict[str, str] = {}  # for whom each device is now
        self.closed: dict[str, str] = {}  # why a card without a lock is not free: its MPS ends

    @property
    def held(self) -> dict[str, Lock]:
        """Return the locks as far as they are known."""
        return self.locks or {}

    def find_orphans(self, lock: "Lock | None") -> str:
        """Return what has a device open of the dead owner of a lock, as a clause."""
        verdict = (self.verdicts or {}).get(lock.owner.token) if lock and lock.owner else None
        return verdict.orphans if verdict else ""


def device_states(
    devices: list[Device],
    view: NodeView,
    expected: int = 0,
    foreign: frozenset[str] = frozenset(),
    idle: frozenset[str] = frozenset(),
) -> list[DeviceState]:
    """Return one row a device: the node's, locked ones that are gone, and as many as are missing.

    `view` is what the node's files say; `expected` GPUs, 0 where that is not known. `foreign` are
    ids with processes of nobody's, `idle` those that are held and observed to do nothing.
    """
    result = [shown_device_state(device, view, foreign, idle) for device in devices]
    known = [device.id for device in devices]
    for name, lock in sorted(view.held.items()):
        if any([lock_ids_overlap(name, other) for other in known]):
            continue
        card = name.partition(SHARE)[0]
        if SHARE in name and result and result[-1].id == card:
            result[-1].others.append(lock)
            continue
        row = DeviceState(card, None, lock, MISSING, "locked, but the driver does not show it")
        row.orphans = view.find_orphans(lock)
        result.append(row)
    gone = expected - len({d.bus for d in devices}) - (len(result) - len(devices))
    known += [row.id for row in result if row.device is None]
    out = {card_bus_id(name) for name in view.quarantined or {}}
    noted = sorted(out - {card_bus_id(name) for name in known})
    for number in range(gone):
        name = noted[number] if number < len(noted) else f"missing-{number}"
        result.append(DeviceState(name, None, None, MISSING, "expected, but not there"))
        result[-1].noted = name if name in noted else ""
    return result


def shown_device_state(
    device: Device,
    view: NodeView,
    foreign: frozenset[str] = frozenset(),
    idle: frozenset[str] = frozenset(),
) -> DeviceState:
    """Return the row of a device that the driver shows."""
    held, out = view.held, view.quarantined or {}
    why = view.closed.get(device.id, "") or view.reserved.get(device.id, "")
    lock = held.get(device.id)
    over: "list[Lock | None]" = [lock]
    if lock is None:
        over = [held[name] for name in sorted(held) if lock_ids_overlap(name, device.id)] or [None]
    judged = [(*classify_device(device, one, out, view.verdicts), one) for one in over]
    state, reason, lock = min(judged, key=lambda one: STATES.index(one[0]))
    if state == FREE and device.id in foreign:
        state, reason = FOREIGN, f"{why or 'free'}, but in use by a process"
    elif state == FREE and why:
        state, reason = HELD, why
    if state == HELD and lock is not None and idle.issuperset([one.id for one in over if one]):
        state = HELD_IDLE
    row = DeviceState(device.id, device, lock, state, reason)
    row.orphans = view.find_orphans(lock)
    row.reserved = lock is None and device.id in view.reserved
    row.others = [one for one in over if one and one is not lock]
    if state == QUARANTINED:
        row.noted = next((name for name in out if lock_ids_overlap(name, device.id)), "")
    return row


def classify_device(
    device: Device,
    lock: "Lock | None",
    out: dict[str, str],
    verdicts: "dict[str, Verdict] | None",
) -> tuple[str, str]:
    """Return (state, reason) as far as locks, quarantine and verdicts tell."""
    if device.fault:
        return MISSING, device.fault
    away = [reason for name, reason in out.items() if lock_ids_overlap(name, device.id)]
    if away or device.withheld:
        return QUARANTINED, away[0] if away else NO_INSTANCE
    if lock is None:
        return FREE, ""
    if lock.owner is None:
        return NOT_KNOWN, lock.fault or "a claim is being made"
    verdict = (verdicts or {}).get(lock.owner.token)
    if verdict is not None and verdict.orphans:
        return QUARANTINED, f"orphans: {verdict.orphans}"
    if verdict is not None and verdict.state == DEAD:
        return STALE, verdict.proof
    if verdict is not None and verdict.state == UNKNOWN:
        return NOT_KNOWN, verdict.proof
    return HELD, "its job is gone, processes are not" if lock.owner.draining else ""


def count_device_states(rows: list[DeviceState]) -> dict[str, int]:
    """Return how many devices are in each of the eight states."""
    total: dict[str, int] = {state: 0 for state in STATES}
    for row in rows:
        total[row.state] += 1
    return total
