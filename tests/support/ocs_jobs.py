# SPDX-License-Identifier: Apache-2.0
"""Jobs as execd of Open Cluster Scheduler spools them, in the layout of each of its releases.

Written from libs/cull and libs/sgeobj/cull of these releases, not from what reads them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tests.support.pairs import zip_equal

DATA = Path(__file__).parent / "data/ocs-9.1.5"
REAL = {int(path.stem): path.read_bytes() for path in sorted(DATA.glob("*.job"))}
CODES = {**dict(zip_equal("DUBSLORH6", (2, 3, 6, 8, 9, 10, 11, 12, 13)))}
NO, YES, JOB, HOST = range(4)  # CE_consumable
GLOBAL, MASTER, SLAVE = range(3)  # JRS_scope
BOUND, OBJECT = 2, 8  # status of an element
HEAD = "USULLLLLLSSSSSSUS666SUSUSSBUBUULULLLUSOUULLLB"
NINE_0, NINE_1, NINE_2 = "9.0", "9.1", "9.2"
JOBS = {
    NINE_0: f"{HEAD}LULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUULSLL",
    NINE_1: f"{HEAD}LULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUUOSLLUUU",
    NINE_2: f"{HEAD}LULSLSSLLLLLLLLHRLLU66ULDDDDDDUUUOSLLUUU",
}
TASKS = {
    NINE_0: "UU66USULLSUUU6USLLLUDDDDDULLLOU6DD6LL",
    NINE_1: "UU66USULLSUUU6USSSULLLUDDDDDULLLOU6DD6LL",
    NINE_2: "UU66USULLSUUU6USSSULLLUDDDDDULLLOU6DD6LSL",
}
COMPLEX, REQUESTS = "SSUSDUUSUSDUUUSL", "ULLLLSB"


@dataclass(frozen=True)
class Grant:
    """What one host granted of a complex, with (id, times) of an RSMAP."""

    name: str
    amount: float
    host: str = "node"
    ids: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ask:
    """One `-l name=value` of a scope."""

    name: str
    value: float
    flag: int = YES
    scope: int = GLOBAL


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def string(value: str | bytes) -> bytes:
    return (value if isinstance(value, bytes) else value.encode()) + b"\0"


class Packer:
    """Pack values as one release does."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.first = 4150 if release == NINE_0 else 6950

    def value(self, letter: str, value: object) -> bytes:
        """Pack a value, an empty one for None."""
        if letter in "SH":
            return string(value) if isinstance(value, (str, bytes)) else string("")
        if letter == "D":
            return struct.pack(">d", value or 0)
        if letter == "6":
            return struct.pack(">Q", value or 0)
        if letter == "R":
            return b""
        return value if isinstance(value, bytes) else number(value if isinstance(value, int) else 0)

    def descriptor(self, letters: str, first: int) -> bytes:
        """Pack the names and types of fields, with flags that a reader has to drop."""
        fields = [number(first + n) + number(0x10000 | CODES[c]) for n, c in enumerate(letters)]
        return number(len(letters)) + b"".join(fields)

    def element(self, letters: str, values: dict[int, object], status: int = BOUND) -> bytes:
        """Pack an element with these values by place."""
        packed = [self.value(letter, values.get(n)) for n, letter in enumerate(letters)]
        return number(status) + b"".join(packed)

    def list(self, letters: str, first: int, *rows: dict[int, object]) -> bytes:
        """Pack a list: with its count in 9.0, with a mark before each element later."""
        elements = [self.element(letters, row) for row in rows]
        if self.release == NINE_0:
            head = number(1) + number(len(rows)) + string("x") + self.descriptor(letters, first)
            return head + b"".join(elements)
        head = number(1) + string("x") + self.descriptor(letters, first)
        return head + b"".join(number(1) + one for one in elements) + number(0)

    def object(self, letters: str, first: int) -> bytes:
        """Pack an object of empty values."""
        return number(1) + self.descriptor(letters, first) + self.element(letters, {}, OBJECT)

    def granted(self, grants: tuple[Grant, ...]) -> bytes:
        """Pack JAT_granted_resources_list, none at all where nothing was granted."""
        old = self.release == NINE_0
        letters, ids, times = ("USDLH", "SU", 1) if old else ("USDLLH", "SUUULL", 3)
        rows: list[dict[int, object]] = []
        for grant in grants:
            kept: list[dict[int, object]] = [{0: one, times: n} for one, n in grant.ids]
            packed = self.list(ids, 4150, *kept) if kept else None
            values = {0: 2 * bool(kept), 1: grant.name, 2: grant.amount, 3: packed}
            rows.append({**values, len(letters) - 1: grant.host})
        return self.list(letters, 4050, *rows) if rows else number(0)

    def requests(self, asks: tuple[Ask, ...]) -> bytes:
        """Pack JB_request_set_list: a set for each scope."""
        sets: list[dict[int, object]] = []
        for scope in (MASTER, GLOBAL, SLAVE):
            ours = [one for one in asks if one.scope == scope]
            rows: list[dict[int, object]] = [{0: a.name, 2: 1, 4: a.value, 6: a.flag} for a in ours]
            if rows:
                sets.append({0: scope, 1: self.list(COMPLEX, 1350, *rows)})
        return self.list(REQUESTS, 200, *sets) if sets else number(0)


def ocs_job(
    asks: tuple[Ask, ...] = (),
    grants: tuple[Grant, ...] = (),
    release: str = NINE_1,
    job_id: int = 12,
    owner: str = "alice",
    task: int = 1,
    tail: bytes = b"",
) -> bytes:
    """Return a spooled job of one task."""
    packer, letters = Packer(release), JOBS[release]
    of_task: dict[int, object] = {0: task, 1: 128, 8: packer.granted(grants)}
    tasks = 59 if release == NINE_2 else 60
    values: dict[int, object] = {
        0: job_id,
        1: "job",
        20: owner,
        21: 1000,
        33: packer.list("SS", 2150, {0: "HOME", 1: "/"}),
        45: packer.requests(asks),
        letters.index("OS", 60) if release != NINE_0 else -1: packer.object("US", 900),
        tasks: packer.list(TASKS[release], 6950, of_task),
    }
    if release == NINE_0:
        return number(0) + number(0x10020000) + packer.element(letters, values) + tail
    return number(0) + number(0x10021000) + b"\0" + packer.element(letters, values) + tail
