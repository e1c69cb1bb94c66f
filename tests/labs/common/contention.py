# SPDX-License-Identifier: Apache-2.0
"""Jobs that contend for whole GPUs and for places, and say themselves what they have and when.

A job writes a line when it begins to use its GPUs and one before it ends, one job at a time. So
two lines that exclude each other prove that two jobs had a GPU at a time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

CONTENDERS: Final = 64
_LINE: Final = '"$USER ${GPULOCK_SHARE:-whole} $CUDA_VISIBLE_DEVICES"'


def prepare_log(folder: Path) -> Path:
    """Make an empty log in a folder, which every user may write; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    log, lock = folder / "contention", folder / "contention.lock"
    for path in (log, lock):
        path.write_text("")
        path.chmod(0o666)
    return log


def contender_script(log: Path) -> str:
    """Return the script of a contender (bash)."""
    write = f"flock 9; echo %s {_LINE} >>{log}; flock -u 9\n"
    hold = "sleep 0.1\n"
    return f"exec 9>>{log}.lock\n{write % '+'}{hold}{write % '-'}"


def find_cards_had_both_ways(lines: list[str]) -> set[str]:
    """Return the cards that a job had whole, and of which two jobs had places at a time; pure."""
    whole: set[str] = set()
    shared: set[str] = set()
    holders: Counter[str] = Counter()
    for line in lines:
        sign, _, share, mask = line.split()
        for card in mask.split(","):
            if share == "whole":
                whole.add(card)
                continue
            holders[card] += 1 if sign == "+" else -1
            shared |= {card} if holders[card] > 1 else set()
    return whole & shared


def replay(lines: list[str], places: int) -> tuple[int, str]:
    """Return how many jobs began, and the first thing that must not be, or nothing; pure.

    Lines are `+ USER SHARE MASK` and `- USER SHARE MASK`. SHARE is `whole`, or `1/4` for each card.
    """
    whole: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    users: dict[str, Counter[str]] = {}
    begun = 0
    for line in lines:
        sign, user, share, mask = line.split()
        step = 1 if sign == "+" else -1
        begun += sign == "+"
        for number, card in enumerate(mask.split(",")):
            if share == "whole":
                whole[card] += step
            else:
                shares[card] += step * int(share.split(",")[number].partition("/")[0])
                users.setdefault(card, Counter())[user] += step
            here = [name for name, count in users.get(card, Counter()).items() if count > 0]
            if whole[card] > 1 or shares[card] > places or (whole[card] and shares[card]):
                return begun, f"{line}: GPU {card} has {whole[card]} and {shares[card]} shares"
            if len(here) > 1:
                return begun, f"{line}: GPU {card} has shares of {' and '.join(here)}"
    left = [card for card in {*whole, *shares} if whole[card] or shares[card]]
    return begun, f"GPU {left[0]} is in use at the end" if left else ""
