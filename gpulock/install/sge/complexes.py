# SPDX-License-Identifier: Apache-2.0
"""The complexes by which qmaster counts GPUs: in the table of the cluster, and on a host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.items import Item, Wanted
from gpulock.install.sge.host import REPORTED, SgeHost
from gpulock.install.sge.qconf import Qconf
from gpulock.node.context import Node
from gpulock.node.kinds import SHARE_KIND
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card
from gpulock.sge.sensor import complex_devices

# complex(5) from the type on: type relop requestable consumable default urgency
_COUNTED: Final = "INT <= YES YES 0 0"
_REPORTED: Final = "INT <= YES NO 0 0"
_COUNTS: Final = re.compile(
    r"\S+ \S+ (INT|RSMAP) <= (YES|FORCED) (YES|JOB|HOST) (0|NONE) \S+"
)  # of a site's own


def counting_complexes(settings: Settings) -> list[str]:
    """Return the complexes by which jobs ask for GPUs: the plain one, and those of kinds."""
    kinds = [name for name, kind in settings.sge_kinds.items() if kind]
    return [*dict.fromkeys([settings.sge_complexes[0], *kinds])]


def cluster_complexes(settings: Settings) -> dict[str, str]:
    """Return the line of each complex that jobs and the load sensor need."""
    lines = {name: f"{name} {name} {_COUNTED}" for name in counting_complexes(settings)}
    return lines | {name: f"{name} {name} {_REPORTED}" for name in REPORTED}


def host_amount(settings: Settings, name: str, gpus: int) -> int:
    """Return how many GPUs of this node a complex counts.

    The plain one counts `gpus`, on a node with MIG those of its kind.
    """
    try:
        devices = Node(settings).devices()
    except Refusal:  # no driver is loaded
        devices = []
    if settings.sge_kinds.get(name) or any(device.parent for device in devices):
        if settings.sge_kinds.get(name) == SHARE_KIND:
            return sum(count_places_by_card(devices, settings.shares).values())
        return len(complex_devices(devices, settings, name))
    return gpus


def check_complexes(table: Mapping[str, str], lines: Mapping[str, str]) -> None:
    """Raise InstallError for a complex that is there and cannot count GPUs; pure."""
    for name in lines:
        if name in table and name not in REPORTED and not _COUNTS.fullmatch(table[name]):
            raise InstallError(
                f"complex `{table[name]}` cannot count GPUs: its type must be INT or RSMAP, its"
                " relation <=, requestable YES or FORCED, consumable YES (per slot), JOB or HOST,"
                " and its default 0, for no hook sees another; correct it by qconf -mc"
            )


class Complexes(Item):
    """The complexes that count GPUs and tell of them; they stay, for the site's jobs name them."""

    title = "table of complexes"

    def __init__(self, qconf: Qconf, lines: Mapping[str, str]) -> None:
        self.qconf, self.lines = qconf, lines

    def read(self) -> str | None:
        table = self.qconf.complexes()
        return "\n".join(table[name] for name in self.lines if name in table)

    def goal(self, wanted: Wanted) -> str | None:
        table = {**self.lines, **self.qconf.complexes()}
        return "\n".join(table[name] for name in self.lines)

    def write(self, wanted: Wanted) -> None:
        """Add what is missing to the table of this moment, in one write."""
        table = {**self.lines, **self.qconf.complexes()}
        self.qconf.load("-Mc", "complexes", "\n".join(table.values()) + "\n")


class Amounts(Item):
    """How much of each complex the host has; what stands there stays, for the site's jobs count it.

    A complex that gives out ids has those that the site names.
    """

    def __init__(self, host: SgeHost, amounts: Mapping[str, int]) -> None:
        self.host, self.amounts = host, amounts
        self.title = f"complex_values of host {host.name}"

    def missing(self) -> list[str]:
        """Return what the host has no value of, as qconf takes it."""
        here = self.host.values("complex_values")
        return [f"{name}={n}" for name, n in self.amounts.items() if n and name not in here]

    def show(self, wanted: Wanted) -> list[str]:
        return [f"  + {one}" for one in self.missing()] if wanted is Wanted.PRESENT else []

    def write(self, wanted: Wanted) -> None:
        for one in self.missing():
            words = ("exechost", "complex_values", one, self.host.name)
            self.host.qconf.run("qconf", "-mattr", *words)
