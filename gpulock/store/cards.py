# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/cards: what gpulockd knows of each GPU, and what became of it.

Hot folder, but no hook reads the whole: a claim reads the suspects alone (quarantine.py). Who
changes it holds the gate. All but the steps is of one boot. Times are CLOCK_BOOTTIME seconds, those
of steps epoch seconds. What cannot be read of it is not known.
"""

import time

from gpulock.deadline import Deadline
from gpulock.errors import one_line
from gpulock.store import atomic, kv
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.quarantine import CARDS, CARDS_LIMIT, CARDS_LINE, SUSPECT

COMMAND = "command"  # the check that HEALTH_COMMAND is
OUT, RESET, TESTED, BACK = "out", "reset", "tested", "back"
GATE_SECONDS = 2.0
MOST_STEPS = 200
LONGEST_WORDS = 200  # characters of a step, and of a reason


class CardState:
    """One device. `found` has why each check failed, and nothing for one that is good.

    A check that could not be made is not there. `most` are the lanes, the PCIe generation and the
    NVLinks that it had at most, 0 where that is not known. `tested` is when HEALTH_COMMAND was
    started last, `tries` when gpulockd began to reset it, `reset` when a reset of it was done; 0
    and nothing where that was not in this boot. `suspect` is why claims take it last.
    """

    __slots__ = ("found", "most", "reset", "suspect", "tested", "tries")

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.most: tuple[int, int, int] = (0, 0, 0)
        self.tested: "float | None" = None
        self.tries: tuple[float, ...] = ()
        self.reset = 0.0
        self.suspect = ""

    def failed(self) -> dict[str, str]:
        """Return the checks that failed, and why."""
        return {name: why for name, why in self.found.items() if why}

    def has_passed(self, since: float) -> bool:
        """Return whether HEALTH_COMMAND was started after `since`, and has ended well."""
        return (self.tested or 0.0) > since and self.found.get(COMMAND) == ""


class CardStep:
    """What became of `device` (a lock id) at `at`: it went out, was reset, tested, came back."""

    __slots__ = ("at", "device", "step", "words")

    def __init__(self, at: float, device: str, step: str, words: str) -> None:
        self.at, self.device, self.step, self.words = at, device, step, words


class XidCounts:
    """The XIDs and SXids of each card or NVSwitch in this boot: how many, and when the last was.

    `sequence` is the last record of the kernel's log that changed them, -1 before the first one:
    reading goes on behind it. `loaded` is when the driver was loaded; what was before is over.
    """

    __slots__ = ("errors", "loaded", "sequence")

    def __init__(self) -> None:
        self.sequence = -1
        self.loaded = 0.0
        self.errors: dict[tuple[str, int], tuple[int, float]] = {}  # by bus id and number


class NodeCards:
    """The file. `known` are the cards that were here, `marks` on what the policy has acted."""

    __slots__ = ("boot_id", "known", "marks", "states", "steps", "stored", "xids")

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.states: dict[str, CardState] = {}  # by lock id
        self.marks: dict[tuple[str, str], int] = {}  # by device and key of a finding
        self.known: set[str] = set()
        self.xids = XidCounts()
        self.steps: list[CardStep] = []  # the latest last
        self.stored: "str | None" = None  # the file as it was read

    def of(self, device: str) -> CardState:
        """Return what is known of a device; what is changed in it is saved."""
        return self.states.setdefault(device, CardState())

    def add_step(self, device: str, step: str, words: str) -> None:
        """Add a step, which is now."""
        words = one_line(words)[:LONGEST_WORDS]
        self.steps = [*self.steps, CardStep(time.time(), device, step, words)][-MOST_STEPS:]

    def steps_of(self, device: str) -> "list[CardStep]":
        """Return the steps of a device and its card."""
        return [
            one for one in self.steps if device == one.device or device.startswith(f"{one.device}.")
        ]

    def text(self) -> str:
        """Return the file; raise kv.MalformedError."""
        pairs = [("boot_id", self.boot_id), ("known", " ".join(sorted(self.known)))]
        pairs += [("log", f"{self.xids.sequence} {self.xids.loaded:.3f}")]
        for (bus, number), (times, at) in sorted(self.xids.errors.items()):
            pairs.append((f"xid {bus} {number}", f"{times} {at:.3f}"))
        for name, state in sorted(self.states.items()):
            pairs += _state_pairs(name, state)
        pairs += [(f"mark {name} {key}", str(n)) for (name, key), n in sorted(self.marks.items())]
        for number, one in enumerate(self.steps):
            pairs.append((f"step {number}", f"{one.at:.0f} {one.device} {one.step} {one.words}"))
        return f"{CARDS_LINE}\n{kv.encode_pairs(pairs)}"


def _state_pairs(name: str, state: CardState) -> "list[tuple[str, str]]":
    pairs: list[tuple[str, str]] = []
    if any(state.most):
        pairs.append((f"most {name}", " ".join([str(number) for number in state.most])))
    if state.tested is not None:
        pairs.append((f"tested {name}", f"{state.tested:.3f}"))
    if state.tries:
        pairs.append((f"tries {name}", " ".join([f"{at:.3f}" for at in state.tries])))
    if state.reset:
        pairs.append((f"reset {name}", f"{state.reset:.3f}"))
    if state.suspect:
        pairs.append((f"{SUSPECT}{name}", state.suspect))
    return pairs + [(f"check {name} {check}", why) for check, why in sorted(state.found.items())]


def parse_cards(text: str, boot_id: str) -> NodeCards:
    """Return what a file says, of another boot the steps alone; raise ValueError."""
    pairs = kv.decode_pairs(text, CARDS_LINE)
    cards = NodeCards(boot_id)
    same = pairs.pop("boot_id", "") == boot_id
    for key, value in pairs.items():
        kind, _, rest = key.partition(" ")
        name, _, what = rest.partition(" ")
        words = value.split(" ")
        if kind == "step":
            at, device, step, said = value.split(" ", 3)
            cards.steps.append(CardStep(float(at), device, step, said))
        elif not same:
            continue
        elif kind == "known":
            cards.known = {word for word in words if word}
        elif kind == "log":
            cards.xids.sequence, cards.xids.loaded = int(words[0]), float(words[1])
        elif kind == "xid":
            cards.xids.errors[name, int(what)] = int(words[0]), float(words[1])
        elif kind == "mark":
            cards.marks[name, what] = int(value)
        elif kind == "check":
            cards.of(name).found[what] = value
        elif kind == "suspect":
            cards.of(name).suspect = value
        elif kind == "most":
            width, generation, links = words
            cards.of(name).most = int(width), int(generation), int(links)
        elif kind == "tries":
            cards.of(name).tries = tuple([float(word) for word in words])
        elif kind in ("tested", "reset"):
            setattr(cards.of(name), kind, float(value))
    return cards


def read_cards(state_dir: str, boot_id: str) -> NodeCards:
    """Return what is known of each card; nothing where that cannot be read."""
    stored = None
    try:
        stored = atomic.read_text(f"{state_dir}/{CARDS}", CARDS_LIMIT)
        cards = parse_cards(stored, boot_id)
    except (OSError, ValueError, IndexError):
        cards = NodeCards(boot_id)
    cards.stored = stored
    return cards


def save_cards(state_dir: str, cards: NodeCards) -> bool:
    """Replace the file, durably; return False where another has changed it since it was read.

    The gate is held. Raises OSError or kv.MalformedError.
    """
    path = f"{state_dir}/{CARDS}"
    try:
        stored: "str | None" = atomic.read_text(path, CARDS_LIMIT)
    except FileNotFoundError:
        stored = None
    if stored != cards.stored:
        return False
    data = cards.text().encode("utf-8", "replace")
    if stored is None or data != stored.encode("utf-8", "surrogateescape"):
        atomic.replace_file(path, data, durable=True)
        cards.stored = data.decode("utf-8", "surrogateescape")
    return True


def save_changed_cards(store: LockStore, state_dir: str, cards: NodeCards) -> None:
    """Save what is known, where it changed; what another has changed meanwhile stands.

    Raises Refusal, OSError or kv.MalformedError.
    """
    if cards.text() != cards.stored:
        with Gate(store, Deadline(GATE_SECONDS)):
            save_cards(state_dir, cards)


def note_card_step(state_dir: str, boot_id: str, device: str, step: str, words: str) -> None:
    """Add a step, the gate held; one that cannot be written is left out."""
    cards = read_cards(state_dir, boot_id)
    cards.add_step(device, step, words)
    try:
        save_cards(state_dir, cards)
    except (OSError, kv.MalformedError):
        return
