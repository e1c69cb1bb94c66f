# SPDX-License-Identifier: Apache-2.0
"""Places on a card that several owners hold at a time: which places a claim gets, or why none.

Hot, loaded where SHARES is set or a share is asked for. `choose_share_places` is called with the
gate held. While a place of a card is held, the card has as many places as it had when that was
claimed. A claim records one number, the smallest of its cards'. Where the locks of a card differ,
the last by id counts.
"""

from gpulock.errors import BROKEN, INVALID_REQUEST, Refusal
from gpulock.node.devices import SHARE, Device, place_device
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card, parse_share_word
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.choose import ClaimRequest
    from gpulock.alloc.states import DeviceState


def check_share_request(devices: list[Device], want: "ClaimRequest", settings: Settings) -> None:
    """Raise Refusal for shares that the node can never, or not in its present state, give."""
    places = count_places_by_card(devices, settings.shares)
    gone = count_gone_places(devices, settings)
    cards = [device for device in devices if device.id in places]
    if not cards and (want.wanted or not gone):
        from gpulock.node.kinds import format_device_kinds

        why = f"this node has no shares of a GPU, but {format_device_kinds(devices)}"
        raise Refusal(INVALID_REQUEST, why, "ask for whole GPUs")
    for device in devices:
        if device.id in want.wanted and device.id not in places:
            names = ", ".join([str(card.index) for card in cards])
            why = f"GPU {device.index} has no shares: GPU {names} has"
            raise Refusal(INVALID_REQUEST, why, "ask for it whole, or for another")
    there = dict.fromkeys(want.wanted, 1) or {**places, **gone}
    most = largest_share_claim(there, settings)
    asked = format_requested_shares(want.count)
    if want.count > most:
        raise Refusal(INVALID_REQUEST, f"{asked}, a claim gets at most {most}", "ask for fewer")
    working = {card.id: there[card.id] for card in cards if card.id in there and not card.fault}
    work = largest_share_claim(working, settings)
    if want.count > work:
        why = f"{asked}, {work} of {most} work"
        raise Refusal(BROKEN, why, "see gpulock status for the missing card")


def count_gone_places(devices: list[Device], settings: Settings) -> dict[str, int]:
    """Return the places of cards that are expected and not there, by their word of SHARES."""
    if settings.expected_gpus <= len({device.bus for device in devices}):
        return {}
    words = [word for word in settings.shares if not count_places_by_card(devices, (word,))]
    return {word: parse_share_word(word)[1] for word in words}


def largest_share_claim(places: dict[str, int], settings: Settings) -> int:
    """Return how many places one claim may get: of one MPS, or of cards with as many each."""
    counts = [*places.values()]
    cards = {number: 1 if settings.share_mps else counts.count(number) for number in counts}
    return max([number * count for number, count in cards.items()], default=0)


def format_requested_shares(count: int) -> str:
    """Return how many shares are asked for, in words."""
    return "1 share asked for" if count == 1 else f"{count} shares asked for"


class CardPlaces:
    """A card of SHARES: how many `places` it has, and the `locks` of those that are held."""

    def __init__(self, card: Device, places: int) -> None:
        self.card = card
        self.places = places
        self.locks: list[Lock] = []


def list_card_places(
    cards: list[Device], held: dict[str, Lock], words: tuple[str, ...]
) -> dict[str, CardPlaces]:
    """Return the places of each card of SHARES, by id."""
    counts = count_places_by_card(cards, words)
    places_by_card = {
        card.id: CardPlaces(card, counts[card.id]) for card in cards if card.id in counts
    }
    for name, lock in held.items():
        card, share, _ = name.partition(SHARE)
        if share and card in places_by_card:
            places_by_card[card].locks.append(lock)
            if lock.owner and lock.owner.places:
                places_by_card[card].places = lock.owner.places
    return places_by_card


def count_free_places(card: CardPlaces, uid: "int | None" = None) -> int:
    """Return how many of a card's places are free: none beside an owner that cannot be read.

    With `uid` all that are held must be that user's.
    """
    owners = [lock.owner for lock in card.locks]
    if any([one is None or uid not in (None, one.uid) for one in owners]):
        return 0
    return max(0, card.places - len(owners))


def card_share_room(
    rows: "list[DeviceState]", held: dict[str, Lock], words: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    """Return (places, how many of them nobody holds) of each card that has some."""
    cards = list_card_places([row.device for row in rows if row.device], held, words)
    room: dict[str, tuple[int, int]] = {}
    for row in [row for row in rows if row.id in cards]:
        usable = row.state == "free" or any([SHARE in lock.id for lock in row.locks()])
        usable = usable and row.state not in ("missing", "quarantined")
        free = count_free_places(cards[row.id]) if usable else 0
        room[row.id] = cards[row.id].places, free
    return room


def choose_share_places(
    free: list[Device],
    held: dict[str, Lock],
    want: "ClaimRequest",
    last: dict[str, int],
    settings: Settings,
) -> list[Device]:
    """Return the places that a claim gets, by card; nothing where too few are free.

    `free` are the cards that nobody holds whole, of the wanted ones alone where there are some:
    then it is one place on each. Else it is one card's places if that is possible, the fullest
    card's first. Cards with unlike numbers of places are never mixed, unless they are
    wanted by name. Where the scheduler counts places itself (`counted`), a card that SHARES
    does not name has as many as it takes.
    """
    uid = want.uid if settings.share_users == "one" else None
    there = list_card_places(free, held, settings.shares)
    room = {name: count_free_places(card, uid) for name, card in there.items()}
    places = {name: card.places for name, card in there.items()}
    chosen: list[tuple[Device, int]] = []
    if want.wanted:
        chosen = [(card, 1) for card in free if room.get(card.id, int(want.counted)) > 0]
        return make_chosen_places(chosen if len(chosen) == want.count else [], places, held)
    cards = [card for card in free if room.get(card.id, 0) > 0]
    cards.sort(key=lambda card: (last.get(card.id, 0), room[card.id] / places[card.id]))
    alike = [[card for card in cards if places[card.id] == n] for n in sorted({*places.values()})]
    for group in [*[[card] for card in cards], *(alike if not settings.share_mps else ())]:
        left, chosen = want.count, []
        for card in group:
            chosen.append((card, min(left, room[card.id])))
            left -= chosen[-1][1]
        if not left:
            return make_chosen_places(chosen, places, held)
    return []


def make_chosen_places(
    chosen: list[tuple[Device, int]], places: dict[str, int], held: dict[str, Lock]
) -> list[Device]:
    """Return the first free places, so many of each card, in the order of the node."""
    placed: list[Device] = []
    for card, count in sorted(chosen, key=lambda one: one[0].index):
        names = [f"{card.id}{SHARE}{n}" for n in range(1, len(held) + count + 1)]
        unheld = [name for name in names if name not in held]
        placed += [place_device(card, name, places.get(card.id, 0)) for name in unheld[:count]]
    return placed
