# SPDX-License-Identifier: Apache-2.0
"""GRES that Slurm only counts, by types that are kinds: places of SHARES, models, MIG profiles.

Where gpulock selects, a job asks for a place by such a GRES. slurmd drops gres/gpu without File=,
so it has a name of its own (docs/facts/slurm.md, positions in slurmd's list).
"""

from __future__ import annotations

import re
from typing import Final

from gpulock.node.devices import Device
from gpulock.node.kinds import SHARE_KIND, gres_type_kind, is_of_kind
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card

_ENTRY: Final = re.compile(r"\bGres Name=(\S+) Type=([^\s(]\S*) .*?\bCount=([1-9]\d*)\b")


def parse_counted_types(text: str) -> dict[str, int]:
    """Return the count of each `gpux:share` without a file that `slurmd -G` prints; pure."""
    lines = [line for line in text.splitlines() if " File=" not in line]
    found = [match for line in lines if (match := _ENTRY.search(line))]
    return {f"{match[1]}:{match[2]}": int(match[3]) for match in found}


def count_gres_type(found: list[Device], settings: Settings, word: str) -> int:
    """Return how many a node has of what a type means, none of one that is no kind; pure."""
    try:
        kind = gres_type_kind(found, word)
    except ValueError:
        return 0
    if kind == SHARE_KIND:
        return sum(count_places_by_card(found, settings.shares).values())
    return len([device for device in found if is_of_kind(device, kind)])


def counts_no_places(settings: Settings, found: list[Device], counted: dict[str, int]) -> bool:
    """Return whether SHARES gives places here that Slurm does not count; pure."""
    names = [f"{name}:{SHARE_KIND}" for name in settings.slurm_gres if name != "gpu"]
    return bool(settings.shares and count_gres_type(found, settings, SHARE_KIND)) and not any(
        name in counted for name in names
    )
