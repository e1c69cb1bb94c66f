# SPDX-License-Identifier: Apache-2.0
"""Which GPU an id of an RSMAP is: STATE_DIR/sge-map, made by `gpulock install sge`, by its --map.

Hot, loaded only for a job that was granted ids. A site names its ids as it likes (GPU1 may be
the first one), so the map is the administrator's word: an id that is not in it is never guessed.
A GPU stands there by its PCI address, which no boot and no driver renumbers.
"""

from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.store import atomic, kv

MAP_NAME = "sge-map"
LINE = "gpulock-sge-map 1"
HOST = "host"
DO = "run gpulock install sge --map on this node"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    CardMap = dict[tuple[str, str], str]  # (complex, id) -> device


def read_card_map(state_dir: str) -> "tuple[str, CardMap]":
    """Return Grid Engine's name of this host and the map, both empty where there is none.

    Raises OSError or ValueError.
    """
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{state_dir}/{MAP_NAME}"), LINE)
    except FileNotFoundError:
        return "", {}
    cards: CardMap = {}
    for key, device in pairs.items():
        name, blank, card = key.partition(" ")
        if blank:
            cards[name, card] = device
    return pairs.get(HOST, ""), cards


def format_card_map(host: str, cards: "Mapping[tuple[str, str], str]") -> str:
    """Return the map as its file has it."""
    pairs = [(HOST, host)]
    pairs += [(f"{name} {card}", device) for (name, card), device in cards.items()]
    return f"{LINE}\n{kv.encode_pairs(pairs)}"


def resolve_card_ids(state_dir: str, name: str, ids: list[str]) -> list[str]:
    """Return the devices of the ids of a complex; raise Refusal.

    The job is refused, whatever is wrong with the map: no queue goes into error by it.
    """
    try:
        _, cards = read_card_map(state_dir)
    except (OSError, ValueError) as fault:
        raise Refusal(INVALID_REQUEST, f"{MAP_NAME}: {fault}", DO) from fault
    for card in ids:
        if not cards.get((name, card)):
            raise Refusal(INVALID_REQUEST, f"{MAP_NAME} has no GPU for {name}={card}", DO)
    return [cards[name, card] for card in ids]
