# SPDX-License-Identifier: Apache-2.0
"""The complexes that count GPUs of one kind: offered, made, and given their amount on a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.change import Change, plan_place_change
from gpulock.install.hooks import InstallError
from gpulock.install.sge.cards import is_rsmap
from gpulock.install.sge.places import HostValue
from gpulock.install.sge.qconf import Qconf
from gpulock.install.sge.texts import complex_fault
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.kinds import MODEL, SHARE_KIND, count_device_kinds
from gpulock.node.settings import Settings
from gpulock.sge.complexes import count_complex

CONSUMABLE: Final = "INT <= YES YES 0 0"  # a complex(5) from its type on


def read_node_devices(settings: Settings) -> list[Device]:
    """Return the devices of this node, none where no driver is loaded."""
    try:
        return Node(settings).devices()
    except Refusal:
        return []


def missing_kind_complexes(table: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return the line of each complex of SGE_COMPLEXES that counts a kind and is not there; pure.

    `table` has the complexes that are. Raises InstallError for one that cannot count.
    """
    missing: dict[str, str] = {}
    for name in (name for name, kind in settings.sge_kinds.items() if kind):
        if name not in table:
            missing[name] = f"{name} {name} {CONSUMABLE}"
        elif fault := complex_fault(table[name]):
            raise InstallError(f"complex {name}: {fault}; correct it by qconf -mc")
    return missing


def plan_kind_amounts(
    qconf: Qconf,
    host: str,
    table: Mapping[str, str],
    settings: Settings,
    note: Callable[[str], None],
) -> Iterator[Change]:
    """Tell qmaster this host's amounts of the complexes that count a kind.

    A value that stands there stays. On a node of several kinds without such complexes `note` is
    told which would fit.
    """
    found = read_node_devices(settings)
    for name, kind in settings.sge_kinds.items():
        if not kind:
            continue
        value, count = HostValue(qconf, host, name), count_complex(found, settings, name)
        now = value.read()
        if now is None and count:
            yield from plan_place_change(value, str(count))
        elif now is not None and now != str(count) and not is_rsmap(table.get(name, "")):
            note(f"{value.title} stays {now}, though it has {count} of {kind}")
    if words := offered_complexes(found, settings):
        names = " ".join([*settings.sge_complexes, *words])
        note(f'jobs may ask for a kind: set SGE_COMPLEXES="{names}", and run this again')


def plain_amount(settings: Settings, name: str, gpus: int) -> int:
    """Return how many GPUs a complex counts: `gpus`, of a node with MIG those of its kind."""
    found = read_node_devices(settings)
    split = any(device.parent for device in found)
    return count_complex(found, settings, name) if split or settings.sge_kinds.get(name) else gpus


def offered_complexes(found: list[Device], settings: Settings) -> list[str]:
    """Return words for SGE_COMPLEXES that a node of several kinds, or of shares, still lacks.

    Two models of one first word have their whole names.
    """
    kinds = {kind for kind in settings.sge_kinds.values() if kind}
    known = [kind for kind in count_device_kinds(found) if not kind.endswith("?")]
    words: list[str] = []
    if len(known) > 1 and not kinds - {SHARE_KIND}:
        short = Counter(complex_name(kind) for kind in known)
        for kind in known:
            name = complex_name(kind)
            words.append(f"{name if short[name] == 1 else 'gpu_' + kind[len(MODEL) :]}={kind}")
    if settings.shares and SHARE_KIND not in kinds:
        words.append(f"gpu_share={SHARE_KIND}")
    return words


def complex_name(kind: str) -> str:
    """Return a name for the complex of a kind: `gpu_a100` of a model, `mig_3g.40gb`."""
    start, _, name = kind.partition(":")
    return f"gpu_{name.partition('-')[0]}" if f"{start}:" == MODEL else f"{start}_{name}"


def sensor_difference(settings: Settings, loads: Mapping[str, str]) -> str:
    """Return in which complex the load sensor's values do not fit the node, or nothing.

    `loads` are the values that qmaster has. Fewer than the node has are those in use.
    """
    for name in settings.sge_complexes:
        there = plain_amount(settings, name, settings.expected_gpus)
        told = loads.get(name)
        if told is None:
            return f"it reports no {name}, which SGE_COMPLEXES has"
        if there and float(told) > there:
            return f"it reports {name}={float(told):g}, this node has {there}"
    return ""
