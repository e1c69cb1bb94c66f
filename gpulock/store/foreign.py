# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/foreign: which processes of no claim have a device open, for everybody to read.

Hot. Written by gpulockd alone, which sees all open files. A reader takes nothing older than until
when gpulockd wanted to look again: then it is not known.
"""

from gpulock.store import atomic, kv
from gpulock.store.verdicts import FRESH, ROUNDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERSION_LINE = "gpulock-foreign 1"
SHOWN = 8  # processes of a device that are named
LIMIT = 1 << 20  # bytes


class ForeignUse:
    """How many foreign processes have a device open, and (pid, uid, name) of the first of them."""

    __slots__ = ("count", "processes")

    def __init__(self, count: int, processes: list[tuple[int, int, str]]) -> None:
        self.count = count
        self.processes = processes

    def describe(self, user_name: "Callable[[int], str]") -> str:
        """Return them as a clause: `process 4711 (nvtop) of bob and 3 more`."""
        named = [f"process {pid} ({name}) of {user_name(uid)}" for pid, uid, name in self.processes]
        words = ", ".join(named)
        more = self.count - len(self.processes)
        return f"{words} and {more} more" if more else words


def write_foreign_uses(
    lock_dir: str, found: dict[str, ForeignUse], boot_id: str, now: float, due: float
) -> None:
    """Replace what is known, by device; times are CLOCK_BOOTTIME seconds. Raises OSError."""
    pairs = [("boot_id", boot_id), ("seen", f"{now:.3f}"), ("due", f"{due:.3f}")]
    for device, use in sorted(found.items()):
        words = [f"{pid}:{uid}:{name}" for pid, uid, name in use.processes[:SHOWN]]
        pairs.append((device, " ".join([str(use.count), *words])))
    text = f"{VERSION_LINE}\n{kv.encode_pairs(pairs)}"
    atomic.replace_file(f"{lock_dir}/foreign", text.encode("utf-8", "replace"))


def read_foreign_uses(lock_dir: str, now: float, boot_id: str) -> "dict[str, ForeignUse] | None":
    """Return what is known by device, None where nothing is; raise OSError or ValueError."""
    try:
        text = atomic.read_text(f"{lock_dir}/foreign", LIMIT)
    except FileNotFoundError:
        return None
    pairs = kv.decode_pairs(text, VERSION_LINE)
    seen, due = float(pairs.pop("seen", "nan")), float(pairs.pop("due", "nan"))
    if pairs.pop("boot_id", "") != boot_id or not seen - ROUNDING <= now <= due + FRESH:
        return None
    found: dict[str, ForeignUse] = {}
    for device, value in pairs.items():
        count, *words = value.split(" ")
        named = [word.split(":", 2) for word in words]
        found[device] = ForeignUse(int(count), [(int(p), int(u), name) for p, u, name in named])
    return found
