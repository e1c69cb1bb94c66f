# SPDX-License-Identifier: Apache-2.0
"""MIG instances: what `nvidia-smi -q -x` says of each, beside the exporter's. Pure.

The fields of --query-gpu are of whole cards; of an instance nvidia-smi tells its place and its
memory, and not how busy it is.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as Tree
from collections.abc import Mapping
from typing import NamedTuple

from tests.gpu.compare import Finding, Line
from tests.gpu.scraped import parse_labels

MIB = 1 << 20
ROOM = 8 * MIB  # nvidia-smi rounds to MiB, and two looks are not one
WHY = "nvidia-smi rounds to MiB, and is asked a moment before"
_INFO = re.compile(r"(?m)^gpulock_mig_info\{(.*)\} 1(?:\.0)?$")
_MEMORY = re.compile(r"(?m)^gpulock_mig_memory_(total|used)_bytes\{(.*)\} (\S+)$")
_MIB = re.compile(r"(\d+) MiB")


class Place(NamedTuple):
    """Where an instance is."""

    uuid: str  # of its card
    gi: int
    ci: int


Memory = dict[str, float]  # `total` and `used`, in bytes


def told(text: str) -> dict[Place, Memory]:
    """Return the instances that nvidia-smi lists; none where its answer is no XML."""
    found: dict[Place, Memory] = {}
    try:
        cards = Tree.fromstring(text).iter("gpu")
    except Tree.ParseError:
        return {}
    for card in cards:
        for one in card.iter("mig_device"):
            place = Place(card.findtext("uuid", ""), *(number(one, name) for name in PLACE))
            sizes = {name: one.findtext(f"fb_memory_usage/{name}", "") for name in SIZES}
            matched = {name: _MIB.match(size) for name, size in sizes.items()}
            found[place] = {name: float(m[1]) * MIB for name, m in matched.items() if m}
    return found


PLACE = ("gpu_instance_id", "compute_instance_id")
SIZES = ("total", "used")


def number(one: Tree.Element, name: str) -> int:
    """Return a number of an instance, -1 where it is not told."""
    text = one.findtext(name, "")
    return int(text) if text.isdigit() else -1


def ours(text: str) -> dict[Place, Memory]:
    """Return the instances of a scrape."""
    places: dict[str, Place] = {}
    for matched in _INFO.finditer(text):
        one = parse_labels(matched[1])
        places[one["uuid"]] = Place(one["parent_uuid"], int(one["gi"]), int(one["ci"]))
    found: dict[Place, Memory] = {place: {} for place in places.values()}
    for matched in _MEMORY.finditer(text):
        uuid = parse_labels(matched[2])["uuid"]
        if uuid in places:
            found[places[uuid]][matched[1]] = float(matched[3])
    return found


def compare(answer: str, scrape: str) -> list[Line]:
    """Compare which instances there are, and the memory of each."""
    theirs, mine = told(answer), ours(scrape)
    lines: list[Line] = []
    for place in sorted(theirs.keys() | mine.keys()):
        name = f"mig gi{place.gi} ci{place.ci}"
        if place not in theirs or place not in mine:
            words = "nvidia-smi does not list it" if place in mine else "the exporter does not"
            lines.append(Line(place.uuid, name, Finding.DIFFERED, words))
            continue
        lines += [size(place, name, kind, mine[place], theirs[place]) for kind in SIZES]
    return lines


def size(
    place: Place, name: str, kind: str, mine: Mapping[str, float], theirs: Mapping[str, float]
) -> Line:
    """Compare one size of an instance."""
    metric = f"{name} memory_{kind}_bytes"
    if kind not in mine or kind not in theirs:
        finding = Finding.NEITHER if mine.get(kind) == theirs.get(kind) else Finding.DIFFERED
        return Line(place.uuid, metric, finding, f"{mine.get(kind)}, nvidia-smi {theirs.get(kind)}")
    finding = Finding.AGREED if abs(mine[kind] - theirs[kind]) <= ROOM else Finding.DIFFERED
    return Line(
        place.uuid, metric, finding, f"{mine[kind]:.0f}, nvidia-smi {theirs[kind]:.0f}", WHY
    )
