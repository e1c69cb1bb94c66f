# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/waiting: who waits in gpulockd's queue of users' claims, for everybody to read.

Hot. Written by gpulockd alone. The next gpulockd finds there who waited already.
"""

from gpulock.errors import one_line
from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "waiting"
VERSION_LINE = "gpulock-waiting 1"
LIMIT = 1 << 18  # bytes: 200 callers of 1000 characters
NUMBERS = 4  # of a caller, before the texts
SHOWN = 200  # characters of a reason


class WaitingCaller:
    """One caller: its number, the process that called, its user, and since when it waits.

    `since` in CLOCK_BOOTTIME seconds. `what` it asks for, and `why` it is not served yet.
    """

    __slots__ = ("number", "pid", "since", "start", "uid", "user", "what", "why")

    def __init__(
        self, number: int, process: tuple[int, int, int], since: float, texts: tuple[str, str, str]
    ) -> None:
        self.number = number
        self.pid, self.start, self.uid = process
        self.since = since
        self.user, self.what, self.why = texts


def encode_waiting(callers: list[WaitingCaller], boot_id: str) -> bytes:
    """Return the file."""
    pairs = [("boot_id", boot_id)]
    for one in callers:
        named = [one_line(text).replace(";", ",") for text in (one.user, one.what)]
        texts = [text[:SHOWN] for text in (*named, one_line(one.why))]
        numbers = f"{one.pid} {one.start} {one.uid} {one.since:.3f}"
        pairs.append((str(one.number), "; ".join([numbers, *texts])))
    return f"{VERSION_LINE}\n{kv.encode_pairs(pairs)}".encode("utf-8", "replace")


def write_waiting(lock_dir: str, data: bytes) -> None:
    """Replace the file; raise OSError."""
    atomic.replace_file(f"{lock_dir}/{NAME}", data)


def read_waiting(
    lock_dir: str, boot_id: str, running: "Callable[[int, int], bool]"
) -> list[WaitingCaller]:
    """Return those that wait, in the order of their numbers; nobody where the file is no good.

    `running` says whether a process of that start time runs; one that cannot be seen does.
    """
    callers: list[WaitingCaller] = []
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{lock_dir}/{NAME}", LIMIT), VERSION_LINE)
        if pairs.pop("boot_id", "") != boot_id:
            return []
        for key, value in pairs.items():
            numbers, user, what, why = value.split("; ", 3)
            pid, start, uid, since = numbers.split(" ", NUMBERS - 1)
            process = (int(pid), int(start), int(uid))
            one = WaitingCaller(int(key), process, float(since), (user, what, why))
            if is_running_or_unseen(running, one):
                callers.append(one)
    except (OSError, ValueError):
        return []
    return sorted(callers, key=lambda one: one.number)


def is_running_or_unseen(running: "Callable[[int, int], bool]", one: WaitingCaller) -> bool:
    """Return whether the process of a caller is not proven to have ended."""
    try:
        return running(one.pid, one.start)
    except (OSError, ValueError):
        return True
