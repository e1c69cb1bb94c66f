# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/checks: what gpulockd found wrong with each card, and how HEALTH_COMMAND ended there.

Hot folder, but no hook reads it: claims read `suspects`. Times are CLOCK_BOOTTIME seconds. The file
is of this boot; what cannot be read of it is not known.
"""

from gpulock.store import atomic, kv

NAME = "checks"
VERSION_LINE = "gpulock-checks 1"
LIMIT = 1 << 18  # bytes: 64 cards with 15 checks each are 64 KiB
COMMAND = "command"  # the check that HEALTH_COMMAND is
MOST_SILENT = 2  # tests of a card in a row that end without an outcome before that is told


class CardChecks:
    """One card: `found` has why each check failed, and nothing for one that is good.

    A check that could not be made is not there. `tested` is when HEALTH_COMMAND ended last, None
    where it did not in this boot; `begun` when the one that runs began. `unproven` are the tests
    since the last outcome that told nothing: how many, when the last was over, what ended it.
    `most` are the lanes, the PCIe generation and the NVLinks that the card had at most in this
    boot, 0 where that is not known.
    """

    __slots__ = ("begun", "found", "most", "tested", "unproven")

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.tested: "float | None" = None
        self.begun: "float | None" = None
        self.unproven: tuple[int, float, str] = (0, 0.0, "")
        self.most: tuple[int, int, int] = (0, 0, 0)

    def failed(self) -> dict[str, str]:
        """Return the checks that failed, and why."""
        return {name: why for name, why in self.found.items() if why}

    def unproven_words(self) -> str:
        """Return why HEALTH_COMMAND tells nothing of the card, or nothing where it may yet."""
        count, _, why = self.unproven
        if count <= MOST_SILENT:
            return ""
        return f"HEALTH_COMMAND told nothing {count} times in a row: {why}; it is tried ever later"


def write_card_checks(
    lock_dir: str, cards: "dict[str, CardChecks]", boot_id: str, looked: float
) -> None:
    """Replace what is known of each card, by bus id; raise OSError or kv.MalformedError."""
    pairs = [("boot_id", boot_id), ("looked", f"{looked:.3f}")]
    for bus, card in sorted(cards.items()):
        if any(card.most):
            pairs.append((f"most {bus}", " ".join([str(number) for number in card.most])))
        if card.begun is not None:
            pairs.append((f"begun {bus}", f"{card.begun:.3f}"))
        if card.tested is not None:
            pairs.append((f"tested {bus}", f"{card.tested:.3f}"))
        if card.unproven[0]:
            count, at, why = card.unproven
            pairs.append((f"unproven {bus}", f"{count} {at:.3f} {why}"))
        pairs += [(f"check {bus} {name}", why) for name, why in sorted(card.found.items())]
    text = f"{VERSION_LINE}\n{kv.encode_pairs(pairs)}"
    atomic.replace_file(f"{lock_dir}/{NAME}", text.encode("utf-8", "replace"))


def read_card_checks(lock_dir: str, boot_id: str) -> "tuple[dict[str, CardChecks], float]":
    """Return what is known of each card by bus id, and when gpulockd looked; nothing and 0."""
    cards: dict[str, CardChecks] = {}
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{lock_dir}/{NAME}", LIMIT), VERSION_LINE)
        if pairs.pop("boot_id", "") != boot_id:
            return {}, 0.0
        looked = float(pairs.pop("looked", "0"))
        for key, value in pairs.items():
            kind, _, rest = key.partition(" ")
            bus, _, name = rest.partition(" ")
            card = cards.setdefault(bus, CardChecks())
            if kind == "check":
                card.found[name] = value
            elif kind == "tested":
                card.tested = float(value)
            elif kind == "unproven":
                count, at, why = value.split(" ", 2)
                card.unproven = int(count), float(at), why
            elif kind == "begun":
                card.begun = float(value)
            elif kind == "most":
                width, generation, links = value.split(" ")
                card.most = int(width), int(generation), int(links)
    except (OSError, ValueError):
        return {}, 0.0
    return cards, looked


def has_passed_command(lock_dir: str, boot_id: str, bus: str, since: float) -> bool:
    """Return whether HEALTH_COMMAND has ended well on a card after `since`."""
    card = read_card_checks(lock_dir, boot_id)[0].get(bus)
    return card is not None and (card.tested or 0.0) > since and card.found.get(COMMAND) == ""
