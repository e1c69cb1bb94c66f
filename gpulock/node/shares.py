# SPDX-License-Identifier: Apache-2.0
"""SHARES: which cards give out places, and how many each.

Hot, loaded where SHARES is set. A word is CARD:PLACES. A card is named by its UUID, its PCI bus id
or its index. A UUID goes with the card and a bus id with the slot. An index counts the cards that
the driver shows now, so that it may be another card's once one is gone (docs/shares.md).
"""

from gpulock.node.devices import Device, pci_bus_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

FEWEST, MOST = 2, 100  # places of a card
MOST_INDEX = 4  # digits


def parse_share_word(word: str) -> tuple[str, int]:
    """Return (card, places) of a word like `6:4`; raise ValueError that says what is wrong."""
    card, _, number = word.rpartition(":")
    named = card.lower().startswith("gpu-") or (card.isdecimal() and len(card) <= MOST_INDEX)
    if not named:
        try:
            pci_bus_key(card)
        except ValueError:
            raise ValueError(
                f"must be CARD:PLACES each, a card by index, UUID or bus id, not {word!r}"
            ) from None
    few = number.isascii() and number.isdigit() and len(number) <= len(str(MOST))
    if not (few and FEWEST <= int(number) <= MOST):
        raise ValueError(f"must give a card {FEWEST} to {MOST} places, not {word!r}")
    return card, int(number)


def parse_share_words(text: str) -> tuple[str, ...]:
    """Return the words of SHARES; raise ValueError for one that is none, or names a card twice."""
    words = tuple(text.split())
    cards = [parse_share_word(word)[0].lower() for word in words]
    for card in cards:
        if cards.count(card) > 1:
            raise ValueError(f"must name a card once, not {card!r} twice")
    return words


def is_named_card(card: str, device: Device) -> bool:
    """Return whether a word of SHARES names this device; an instance of MIG has no places."""
    if device.parent:
        return False
    if card.isdecimal():
        return device.index == int(card)
    if card.lower().startswith("gpu-"):
        return device.uuid.lower() == card.lower()
    return pci_bus_key(card) == pci_bus_key(device.bus)


def count_places_by_card(devices: "Iterable[Device]", words: tuple[str, ...]) -> dict[str, int]:
    """Return how many places each card has, by its id; a card that has none is not there.

    Where two words name one card, the fewer places count.
    """
    fewest: dict[str, int] = {}
    asked = [parse_share_word(word) for word in words]
    for device in devices:
        counts = [places for card, places in asked if is_named_card(card, device)]
        if counts:
            fewest[device.id] = min(counts)
    return fewest
