# SPDX-License-Identifier: Apache-2.0
"""Places on a card that several owners hold at a time: which places a claim gets, or why none.

Hot, loaded where SHARES is set or a share is asked for. The gate is held, but for
`check_share_request`. A place is a part of its card, by the setting of the day it was claimed. A
new place fits beside those that are held, so that the parts of a card are one card at most.
"""

from gpulock.alloc.holders import OUT, lock_holder, whole_claims
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, Refusal
from gpulock.node.devices import SHARE, Device, lock_ids_overlap, place_device
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card, parse_share_word
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.choose import ClaimRequest
    from gpulock.alloc.states import DeviceState
    from gpulock.store.owner import Owner

ROUNDING = 1e-9  # in sums of parts


def check_share_request(found: list[Device], want: "ClaimRequest", settings: Settings) -> None:
    """Raise Refusal for shares that the node can never, or not in its present state, give."""
    places = count_places_by_card(found, settings.shares)
    cards = [device for device in found if device.id in places]
    gone = count_gone_places(found, settings)
    if not cards and (want.wanted or not gone):
        from gpulock.node.kinds import format_device_kinds

        why = f"this node has no shares of a GPU, but {format_device_kinds(found)}"
        raise Refusal(INVALID_REQUEST, why, "ask for these")
    for device in found:
        if device.id in want.wanted and device.id not in places:
            names = ", ".join([str(card.index) for card in cards])
            why = f"GPU {device.index} has no shares: GPU {names} has"
            raise Refusal(INVALID_REQUEST, why, "ask for it whole, or for another")
    there = {**places, **gone}
    whole = sum(there.values())
    working = {card.id: places[card.id] for card in cards if not card.fault}
    asked = format_requested_shares(want.count)
    if want.count > whole:
        raise Refusal(INVALID_REQUEST, f"{asked}, this node has {whole}", "ask for fewer")
    most = largest_share_claim(there, settings)
    if settings.share_mps and (want.count > most or len(want.wanted) > 1):
        why = f"{asked}, and MPS serves one card: at most {most}"
        raise Refusal(INVALID_REQUEST, why, "ask for fewer")
    if want.count > most and not want.wanted:
        why = f"{asked}, at most {most} here are of cards with as many places each"
        raise Refusal(INVALID_REQUEST, why, "ask for fewer")
    broken = [card.id for card in cards if card.fault and card.id in want.wanted]
    work = largest_share_claim(working, settings)
    if broken or (want.count > work and not want.wanted):
        why = f"{asked}, {work} of {most} work"
        raise Refusal(BROKEN, why, "see gpulock status for the missing card")


def count_gone_places(found: list[Device], settings: Settings) -> dict[str, int]:
    """Return the places of cards that are expected and not there, by their word of SHARES."""
    if settings.expected_gpus <= len({device.bus for device in found}):
        return {}
    words = [word for word in settings.shares if not count_places_by_card(found, (word,))]
    return {word: parse_share_word(word)[1] for word in words}


def largest_share_claim(places: dict[str, int], settings: Settings) -> int:
    """Return how many places one claim may get: of one MPS, or of cards with as many each."""
    counts = [*places.values()]
    cards = {number: 1 if settings.share_mps else counts.count(number) for number in counts}
    return max([number * count for number, count in cards.items()], default=0)


def holds_places(held: dict[str, Lock], template: "Owner", found: list[Device]) -> bool:
    """Return whether the job that asks has places here already, on cards that are there."""
    cards = [device.id for device in found]
    mine = [one.id for one in held.values() if one.owner and one.owner.key() == template.key()]
    parts = [name.partition(SHARE) for name in mine]
    return bool(parts) and all([share and card in cards for card, share, _ in parts])


def format_requested_shares(count: int) -> str:
    """Return how many shares are asked for, in words."""
    return "1 share asked for" if count == 1 else f"{count} shares asked for"


def shares_of_card(card: str, held: dict[str, Lock]) -> list[Lock]:
    """Return the locks on the places of a card."""
    return [lock for name, lock in held.items() if name.partition(SHARE)[0] == card != name]


def count_free_places(
    card: str, places: int, held: dict[str, Lock], uid: "int | None" = None
) -> int:
    """Return how many places of a card fit beside those held, whatever they were claimed as.

    With `uid` all are that user's, or none is free. A place whose owner cannot be read may be any
    part of the card, so that nothing fits beside it.
    """
    taken = shares_of_card(card, held)
    parts = 0.0
    for lock in taken:
        if lock.owner is None or (uid is not None and lock.owner.uid != uid):
            return 0
        parts += 1 / (lock.owner.places or places)
    return max(0, min(places - len(taken), int(places * (1 - parts) + ROUNDING)))


def card_share_room(
    rows: "list[DeviceState]", held: dict[str, Lock], words: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    """Return (places, how many of them are free for one user) of each card that has some."""
    places = count_places_by_card([row.device for row in rows if row.device], words)
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.id in places:
            usable = row.state == "free" or any([SHARE in lock.id for lock in row.locks()])
            usable = usable and row.state not in ("missing", "quarantined")
            free = count_free_places(row.id, places[row.id], held) if usable else 0
            found[row.id] = places[row.id], free
    return found


def choose_share_places(
    free: list[Device], held: dict[str, Lock], want: "ClaimRequest", settings: Settings
) -> list[Device]:
    """Return the places that a claim gets, by card; nothing where too few are free.

    `free` are the cards that nobody holds whole, of the wanted ones alone where there are some:
    then it is one place on each. Else it is one card's places if that is possible, the fullest
    card's first. Cards of several kinds of place are never mixed. Where the caller counts places
    itself (`counted`), a card that SHARES does not name has as many as it takes.
    """
    places = count_places_by_card(free, settings.shares)
    uid = want.uid if settings.share_users == "one" else None
    room = {name: count_free_places(name, number, held, uid) for name, number in places.items()}
    chosen: list[tuple[Device, int]] = []
    if want.wanted:
        cards = [card for card in free if room.get(card.id, int(want.counted)) > 0]
        chosen = [(card, 1) for card in cards] if len(cards) == want.count else []
        return make_chosen_places(chosen, places, held)
    cards = [card for card in free if room.get(card.id, 0) > 0]
    cards.sort(key=lambda card: (want.last.get(card.id, 0), room[card.id] / places[card.id]))
    for card in cards:
        if room[card.id] >= want.count:
            return make_chosen_places([(card, want.count)], places, held)
    for number in () if settings.share_mps else sorted(set(places.values())):
        left = want.count
        chosen = []
        for card in cards:
            if places[card.id] == number and left:
                chosen.append((card, min(left, room[card.id])))
                left -= chosen[-1][1]
        if not left:
            return make_chosen_places(chosen, places, held)
    return []


def make_chosen_places(
    chosen: list[tuple[Device, int]], places: dict[str, int], held: dict[str, Lock]
) -> list[Device]:
    """Return the first free places, so many of each card, in the order of the node."""
    found: list[Device] = []
    for card, count in sorted(chosen, key=lambda one: one[0].index):
        names = [f"{card.id}{SHARE}{n}" for n in range(1, len(held) + count + 1)]
        for name in [name for name in names if name not in held][:count]:
            place = place_device({card.id: card}, name)
            assert place is not None
            place.places = places.get(card.id, 0)
            found.append(place)
    return found


def share_shortage_refusal(
    found: list[Device],
    held: dict[str, Lock],
    out: dict[str, str],
    want: "ClaimRequest",
    settings: Settings,
) -> Refusal:
    """Return the refusal that says who has the shares; `out` has why a device gives none."""
    closed = [*whole_claims(held), *out]
    away = [name for name, why in out.items() if why == OUT]
    places = count_places_by_card(found, settings.shares)
    cards = [device for device in found if device.id in (want.wanted or places)]
    total = sum([places[card.id] for card in cards])
    usable = [
        card.id
        for card in cards
        if not card.fault and not any([lock_ids_overlap(card.id, name) for name in closed])
    ]
    free = sum([count_free_places(name, places[name], held) for name in usable])
    owners = [lock.owner for name in usable for lock in shares_of_card(name, held)]
    others = settings.share_users == "one" and any([o and o.uid != want.uid for o in owners])
    alone = ", a card is one user's at a time" if others else ""
    names = "; ".join([f"{card.index}: {lock_holder(held, card.id, out)}" for card in cards])
    good = {
        card.id: places[card.id]
        for card in cards
        if not card.fault and not any([lock_ids_overlap(card.id, name) for name in away])
    }
    most = len(good) if want.wanted else largest_share_claim(good, settings)
    do = "the job can run when others have ended"
    if most < want.count:
        do = "the job can run when enough are back in service, see gpulock status"
    return Refusal(
        BUSY,
        f"{format_requested_shares(want.count)}, {free} of {total} free{alone} ({names})",
        do,
    )
