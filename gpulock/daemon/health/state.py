# SPDX-License-Identifier: Apache-2.0
"""What the health policy remembers, in STATE_DIR: of this boot in `health`, and the comebacks.

On what was acted already, which cards were here, the clean checks of what is out, the resets that
were tried, and the XIDs of the kernel's log as far as it was read. While STATE_DIR takes no note of
a bad device, a lock of our own keeps it from the next job: an administrator's in form, so that no
reap frees it; `gpulock unreserve` does, and so do we, once the note stands.
"""

from __future__ import annotations

from typing import Final

from gpulock.alloc.reaper import free_locks
from gpulock.daemon.health.kernel_log import XidCount, XidCounts
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap, pci_bus_key
from gpulock.store import atomic, boot, grants, kv
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.quarantine import POLICY

NAME: Final = "health"  # in STATE_DIR
LINE: Final = "gpulock-health 1"
COMEBACKS: Final = "comebacks"  # in STATE_DIR
DAY: Final = 86400.0  # seconds
LIMIT: Final = 1 << 20  # bytes: 128 instances with twenty findings each are 0.2 MB


class HealthState:
    """Marks by (device, key), cards that were here, and (clean checks, when) by device.

    `tries` has when gpulockd began to reset a card, `xids` what the kernel's log told. Times are
    CLOCK_BOOTTIME seconds.
    """

    def __init__(self) -> None:
        self.done: dict[tuple[str, str], int] = {}
        self.known: set[str] = set()
        self.clean: dict[str, tuple[int, float]] = {}
        self.tries: dict[str, tuple[float, ...]] = {}
        self.xids = XidCounts()

    def text(self, boot_id: str) -> str:
        """Return the file."""
        pairs = [("boot_id", boot_id), ("known", " ".join(sorted(self.known)))]
        pairs += [(f"done {name} {key}", str(n)) for (name, key), n in sorted(self.done.items())]
        checks = sorted(self.clean.items())
        pairs += [(f"clean {name}", f"{times} {at:.3f}") for name, (times, at) in checks]
        for name, tries in sorted(self.tries.items()):
            pairs.append((f"tries {name}", " ".join([f"{at:.3f}" for at in tries])))
        pairs.append(("sequence", str(self.xids.sequence)))
        for (name, number), (times, at) in sorted(self.xids.errors.items()):
            pairs.append((f"error {name} {number}", f"{times} {at:.3f}"))
        return f"{LINE}\n{kv.encode_pairs(pairs)}"


def parse_health_state(text: str, boot_id: str) -> HealthState:
    """Return the book in a text, an empty one for another boot; raise ValueError."""
    pairs = kv.decode_pairs(text, LINE)
    book = HealthState()
    if pairs.get("boot_id") != boot_id:
        return book
    book.known = {name for name in pairs.get("known", "").split() if is_bus_id(name)}
    for key, value in pairs.items():
        kind, _, rest = key.partition(" ")
        name, _, what = rest.partition(" ")
        if kind == "done":
            book.done[name, what] = int(value)
        elif kind == "clean":
            number, _, at = value.partition(" ")
            book.clean[name] = (int(number), float(at))
        elif kind == "tries":
            book.tries[name] = tuple([float(at) for at in value.split()])
        elif kind == "sequence":
            book.xids.sequence = int(value)
        elif kind == "error":
            number, _, at = value.partition(" ")
            book.xids.errors[name, int(what)] = XidCount(int(number), float(at))
    return book


def is_bus_id(name: str) -> bool:
    """Return whether a word is a bus id."""
    try:
        return bool(pci_bus_key(name))
    except ValueError:
        return False


def load_health_state(node: Node) -> HealthState:
    """Return what is remembered of this boot; what cannot be read was not written by us."""
    try:
        return parse_health_state(
            atomic.read_text(f"{node.settings.state_dir}/{NAME}", LIMIT), node.boot_id
        )
    except (OSError, ValueError):
        return HealthState()


def save_health_state(node: Node, book: HealthState) -> None:
    """Write the book; raise OSError."""
    path, text = f"{node.settings.state_dir}/{NAME}", book.text(node.boot_id)
    atomic.replace_file(path, text.encode(), durable=True)


def note_reset_try(node: Node, card: str, now: float) -> tuple[float, ...]:
    """Note that gpulockd resets a card now; return when it did so in this boot. Raises OSError."""
    book = load_health_state(node)
    book.tries[card] = (*book.tries.get(card, ()), now)
    save_health_state(node, book)
    return book.tries[card]


def read_comebacks(node: Node, now: float) -> dict[str, list[float]]:
    """Return when devices came back by themselves in the last day; epoch seconds.

    Raises OSError or ValueError where that cannot be read: then none comes back.
    """
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{node.settings.state_dir}/{COMEBACKS}", LIMIT))
    except FileNotFoundError:
        return {}
    found = {name: [float(word) for word in text.split()] for name, text in pairs.items()}
    return {name: [at for at in times if at > now - DAY] for name, times in found.items()}


def note_comeback(node: Node, device: str, now: float) -> None:
    """Note that a device comes back, before it does; raise OSError or ValueError."""
    known = read_comebacks(node, now)
    known.setdefault(device, []).append(now)
    pairs = [(name, " ".join([f"{at:.0f}" for at in at_])) for name, at_ in known.items() if at_]
    path = f"{node.settings.state_dir}/{COMEBACKS}"
    atomic.replace_file(path, kv.encode_pairs(pairs).encode(), durable=True)


REASON: Final = "faulty, and STATE_DIR cannot be written"


def is_health_lock(lock: Lock) -> bool:
    """Return whether a lock is one of these."""
    record = lock.owner
    if record is None or record.scheduler != "admin":
        return False
    return record.user == POLICY and record.comment == REASON


def lock_bad_device(node: Node, name: str, seconds: float) -> str:
    """Lock a device that is free; return what becomes of it, as a clause."""
    try:
        with Gate(node.store, Deadline(seconds)):
            held = [
                lock
                for lock in node.store.read_all_locks().values()
                if lock_ids_overlap(lock.id, name)
            ]
            if held:
                return "its holder keeps it" if not is_health_lock(held[0]) else "it stays locked"
            note = {"by": POLICY, "reason": REASON}
            grants.make_claim(node.store, boot.reserve_owner(name, note, node.boot_id, node.name))
    except (OSError, Refusal) as fault:
        return f"nor can it be locked: {fault}"
    return "it is locked instead"


def unlock_bad_device(node: Node, name: str, seconds: float) -> None:
    """Free a device that was locked instead of noted; raise OSError or Refusal."""
    if not node.store.exists() or not is_health_lock(node.store.read(name)):
        return
    with Gate(node.store, Deadline(seconds)):
        lock = node.store.read(name)
        if is_health_lock(lock):
            free_locks(node, [lock], "it is quarantined now")
