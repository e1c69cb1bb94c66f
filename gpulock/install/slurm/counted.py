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

COUNTED: Final = "gpux"  # what docs/slurm.md calls it
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


def counted_gres_names(settings: Settings) -> list[str]:
    """Return the GRES of SLURM_GRES that Slurm may only count."""
    return [name for name in settings.slurm_gres if name != "gpu"]


def place_gres_page(
    settings: Settings, found: list[Device], counted: dict[str, int], node: str
) -> list[str]:
    """Return the lines by which Slurm counts the places of SHARES, nothing where it does; pure."""
    places = count_gres_type(found, settings, SHARE_KIND)
    names = counted_gres_names(settings)
    if not places or any(f"{name}:{SHARE_KIND}" in counted for name in names):
        return []
    name = names[0] if names else COUNTED
    keys = [] if names else [f"SLURM_GRES={' '.join([*settings.slurm_gres, name])}"]
    return [
        f"SHARES gives {places} places here. A job can ask for one (--gres={name}:{SHARE_KIND}:1)",
        "once Slurm counts them. Into slurm.conf, beside what is there:",
        "",
        f"    GresTypes={name}",
        f"    NodeName={node} Gres={name}:{SHARE_KIND}:{places}",
        "",
        "Into gres.conf:",
        "",
        f"    NodeName={node} Name={name} Type={SHARE_KIND} Count={places} Flags=CountOnly",
        *(["", "Into gpulock.conf:", "", *[f"    {key}" for key in keys]] if keys else []),
        "",
        "Then restart slurmctld and these slurmds.",
    ]
