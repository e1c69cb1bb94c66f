# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/cards: what gpulockd knows of each GPU.

Warm. A claim reads the suspects alone (store.quarantine): they have a line each, and the rest is
JSON in the last line. Who changes it holds the gate. All but the comebacks is of one boot. Times
are CLOCK_BOOTTIME seconds, those of comebacks epoch seconds. What cannot be read is not known.
"""

from __future__ import annotations

from typing import Any

from gpulock.deadline import Deadline
from gpulock.errors import one_line
from gpulock.store import atomic, kv
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.quarantine import CARDS, CARDS_LIMIT, CARDS_LINE, SUSPECT

COMMAND = "command"  # the check that HEALTH_COMMAND is
GATE_SECONDS = 2.0
NOT_CARDS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
LONGEST_WORDS = 200  # characters of a reason
FIRST_SXID = 10_000  # an NVSwitch's numbers have five digits, a GPU's XIDs less (facts/nvml.md)


class CardState:
    """One device. `checks` has why each check failed, and nothing for one that is good.

    A check that could not be made is not there, but memory that was left in use stays until it is
    looked at again. `most` are the lanes and the NVLinks that it had at most, 0 where that is not
    known. `tested` is when the last test by HEALTH_COMMAND began that had an outcome, None without
    one in this boot. `suspect` is why claims take it last.
    """

    def __init__(self) -> None:
        self.checks: dict[str, str] = {}
        self.most: tuple[int, int] = (0, 0)
        self.tested: "float | None" = None
        self.suspect = ""

    def failed(self) -> dict[str, str]:
        """Return the checks that failed, and why."""
        return {name: why for name, why in self.checks.items() if why}

    def describe_failed(self) -> str:
        """Return why the card is worse than it should be for any job, or nothing."""
        return one_line("; ".join(self.failed().values()))[:LONGEST_WORDS]

    def note_command(self, failure: str, begun: "float | None") -> None:
        """Note how HEALTH_COMMAND ended; a card that does not answer stays suspect for that."""
        before = self.describe_failed()
        self.checks[COMMAND], self.tested = failure, begun
        if self.suspect == before:
            self.suspect = self.describe_failed()

    def has_passed(self, since: float) -> bool:
        """Return whether HEALTH_COMMAND was started after `since`, and has ended well."""
        return (self.tested or 0.0) > since and self.checks.get(COMMAND) == ""


class NodeCards:
    """The file. `known` are the cards that were here, `marks` on what the policy has acted.

    `backs` are the devices that the policy brought back in the last day, and when. `xids` are the
    XIDs and SXids of each card or NVSwitch: how many, and when the last was. `sequence` is the last
    record of the kernel's log that changed them, -1 before the first one: reading goes on behind
    it. `loaded` is when the driver was loaded; what was before is over.
    """

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.states: dict[str, CardState] = {}  # by lock id
        self.marks: dict[tuple[str, str], int] = {}  # by device and key of a finding
        self.known: set[str] = set()
        self.xids: dict[tuple[str, int], tuple[int, float]] = {}  # by bus id and number
        self.sequence = -1
        self.loaded = 0.0
        self.backs: list[tuple[float, str]] = []
        self.stored: "str | None" = None  # the file as it was read
        self.fault = ""  # that it was not understood: it is replaced

    def of(self, device: str) -> CardState:
        """Return what is known of a device; what is changed in it is saved."""
        return self.states.setdefault(device, CardState())

    def text(self) -> str:
        """Return the file; raise kv.MalformedError."""
        import json  # here alone: status does without

        states = sorted(self.states.items())
        suspects = [(f"{SUSPECT}{name}", one.suspect) for name, one in states if one.suspect]
        rest = {
            "known": sorted(self.known),
            "sequence": self.sequence,
            "loaded": self.loaded,
            "xids": [[*key, *value] for key, value in sorted(self.xids.items())],
            "states": {name: vars(one) for name, one in states if vars(one) != vars(CardState())},
            "marks": [[*key, times] for key, times in sorted(self.marks.items())],
            "backs": self.backs,
        }
        pairs = kv.encode_pairs([("boot_id", self.boot_id), *suspects])
        return f"{CARDS_LINE}\n{pairs}{json.dumps(rest)}\n"


def parse_cards(text: str, boot_id: str) -> NodeCards:
    """Return a file's text, of another boot the comebacks alone; raise ValueError and its like."""
    import json

    head, brace, body = text.partition("\n{")
    pairs = kv.decode_pairs(head, CARDS_LINE)
    rest: dict[str, Any] = json.loads(brace + body)
    cards = NodeCards(boot_id)
    cards.backs = [(float(at), str(device)) for at, device in rest["backs"]]
    if pairs["boot_id"] != boot_id:
        return cards
    cards.known = {str(name) for name in rest["known"]}
    cards.sequence, cards.loaded = int(rest["sequence"]), float(rest["loaded"])
    for bus, number, times, at in rest["xids"]:
        cards.xids[str(bus), int(number)] = int(times), float(at)
    for name, key, times in rest["marks"]:
        cards.marks[str(name), str(key)] = int(times)
    for name, known in rest["states"].items():
        state = cards.of(name)
        state.checks = {str(check): str(why) for check, why in known["checks"].items()}
        width, links = known["most"]
        state.most = int(width), int(links)
        state.tested = None if known["tested"] is None else float(known["tested"])
        state.suspect = str(known["suspect"])
    return cards


def read_cards(state_dir: str, boot_id: str) -> NodeCards:
    """Return what is known of each card; nothing where that cannot be read."""
    stored = None
    try:
        stored = atomic.read_text(f"{state_dir}/{CARDS}", CARDS_LIMIT)
        cards = parse_cards(stored, boot_id)
    except OSError:
        cards = NodeCards(boot_id)
    except NOT_CARDS as fault:
        cards = NodeCards(boot_id)
        cards.fault = f"{state_dir}/{CARDS} cannot be understood, and begins anew: {fault!r}"
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
