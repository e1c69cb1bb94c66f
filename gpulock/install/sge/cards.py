# SPDX-License-Identifier: Apache-2.0
"""Which GPU each id of an RSMAP is: `gpulock install sge --map ID=GPU,...`, kept in sge-map.

The administrator says it, once for each id in complex_values of this host: a site may call its
first card GPU1, and no order of ids says which one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulock.daemon.slots.rsmap import load_withdrawn_ids, parse_rsmap, sync_card_ids
from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, Wanted
from gpulock.node import device_list
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.sge.card_map import MAP_NAME, read_card_map

RSMAP = "RSMAP"
CardNames = dict[tuple[str, str], str]  # (complex, id) -> device


def is_rsmap(line: str) -> bool:
    """Say whether a complex gives out ids; `line` is its line of `qconf -sc`; pure."""
    return line.split()[2:3] == [RSMAP]


def read_map_option(text: str, here: list[Device]) -> dict[str, str]:
    """Return id -> device id of `--map GPU1=0,GPU2=1`; raise InstallError; pure.

    A GPU is named by its index, as `gpulock status` shows it, or by its PCI address.
    """
    known = {**{str(one.index): one.id for one in here}, **{one.id: one.id for one in here}}
    cards: dict[str, str] = {}
    for item in text.split(","):
        card, _, gpu = (word.strip() for word in item.partition("="))
        if not (card and gpu) or card in cards:
            raise InstallError(f"--map {text}: give each id once, as in GPU1=0,GPU2=1")
        if gpu not in known:
            raise InstallError(f"--map: the driver shows no GPU {gpu}")
        if known[gpu] in cards.values():
            raise InstallError("--map: one GPU has two ids, and would be granted to two jobs")
        cards[card] = known[gpu]
    return cards


class CardMap(FileItem):
    """The map, by which gpulock is known to be here; it goes once no id is to be put back."""

    def __init__(self, state_dir: str, text: str, host: str, ask: Callable[..., str]) -> None:
        super().__init__(Path(state_dir, MAP_NAME), text)
        self.state_dir, self.host, self.ask = state_dir, host, ask

    def write(self, wanted: Wanted) -> None:
        """Where it goes put back the ids that gpulockd took out: without the map nobody would."""
        wrong: dict[str, str] = {}
        try:
            if wanted is Wanted.ABSENT and (notes := load_withdrawn_ids(self.state_dir)):
                back = dict.fromkeys(notes, ())
                _, wrong = sync_card_ids(self.state_dir, self.host, back, self.ask)
        except (InstallError, OSError, ValueError) as fault:
            wrong = {self.host: str(fault)}
        if wrong:
            why = "; ".join(wrong.values())
            raise InstallError(f"the ids of cards that are out of service stay out: {why}")
        super().write(wanted)


def mapped_cards(settings: Settings, name: str, value: str, option: str) -> CardNames:
    """Return which GPU each id is, by the option, else by the map that is there.

    `value` is what complex_values has of the complex `name`. Raises InstallError.
    """
    try:
        ids = [*parse_rsmap(value)]
        here = device_list.read_devices(settings.driver_root, settings.sys_root)
        _, known = read_card_map(settings.state_dir)
    except (OSError, ValueError) as fault:
        raise InstallError(f"the ids of {name}: {fault}; correct it") from fault
    except Refusal as refusal:
        raise InstallError(f"{refusal.why}; {refusal.do}") from refusal
    kept = {card: device for (complex_, card), device in known.items() if complex_ == name}
    cards = read_map_option(option, here) if option else kept
    if missing := [card for card in ids if card not in cards]:
        example = ",".join(f"{card}={number}" for number, card in enumerate(ids))
        raise InstallError(f"say which GPU is {' '.join(missing)}, as in --map {example}")
    return {(name, card): device for card, device in cards.items()}
