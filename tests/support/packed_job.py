# SPDX-License-Identifier: Apache-2.0
"""Jobs as execd spools them: of Son of Grid Engine 8.1.9, and of each Open Cluster Scheduler.

Written from libs/cull and libs/sgeobj of these releases, not from what reads them. Numbers are big
endian; a string ends with a NUL and a missing one is empty; a list or object begins with a flag
that says whether there is one, and carries the number and type of each field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.pairs import zip_equal

DATA = Path(__file__).parent / "data/ocs-9.1.5"
REAL = {int(path.stem): path.read_bytes() for path in sorted(DATA.glob("*.job"))}
CODES = {**dict(zip_equal("DUBSLORH6", (2, 3, 6, 8, 9, 10, 11, 12, 13)))}
NO, YES, JOB, HOST = range(4)  # CE_consumable
NOT_CONSUMABLE, PER_SLOT, PER_JOB = NO, YES, JOB
GLOBAL, MASTER, SLAVE = range(3)  # JRS_scope
BOUND, OBJECT = 2, 8  # status of an element
HEAD = "USULLLLLLSSSSSSUS666SUSUSSBUBUULULLLUSOUULLLB"
SON, NINE_0, NINE_1, NINE_2 = "8.1.9", "9.0", "9.1", "9.2"
SON_JOB = "USULLLLLLSSSSSSUSUUUSUSUSSBUBUULULLLUSOUULLLBLLLLULSLLSSLLLLLLLLLHRLLUUUULLDDDDDDUUUL"
SON_COMPLEX = "SSUSDUUSUSDUUUS"
SON_TASK, SON_GRANTED = "UUUUUSULSUUUUUSLLLUDDDDDULLLOUUDDUL", "SUHUOUUDDDDDDS"
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


class ResourceRequest(NamedTuple):
    """One `-l name=text` of a job: `value` as Grid Engine parsed it, and the complex's flag."""

    name: str
    value: float
    text: str
    consumable: int = PER_SLOT


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def string(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
    assert b"\0" not in data, value
    return data + b"\0"


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
        return number(status) + self.changed(letters) + b"".join(packed)

    def changed(self, letters: str) -> bytes:
        """Pack which fields were changed, which 8.1.9 does of each element: none."""
        none = number(len(letters)) + bytes((len(letters) + 7) // 8)
        return none if self.release == SON else b""

    def list(self, letters: str, first: int, *rows: dict[int, object], name: str = "x") -> bytes:
        """Pack a list: with its count up to 9.0, with a mark before each element later."""
        elements = [self.element(letters, row) for row in rows]
        if self.release in (SON, NINE_0):
            flag = number(1) if self.release == SON else b""
            head = number(1) + number(len(rows)) + string(name) + flag
            return head + self.descriptor(letters, first) + b"".join(elements)
        head = number(1) + string(name) + self.descriptor(letters, first)
        return head + b"".join(number(1) + one for one in elements) + number(0)

    def object(self, letters: str, first: int, values: dict[int, object] | None = None) -> bytes:
        """Pack an object, of empty values where none are given."""
        element = self.element(letters, values or {}, OBJECT)
        return number(1) + self.descriptor(letters, first) + element

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
) -> bytes:
    """Return a spooled job of one task."""
    packer, letters = Packer(release), JOBS[release]
    of_task: dict[int, object] = {0: 1, 1: 128, 8: packer.granted(grants)}
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
        return number(0) + number(0x10020000) + packer.element(letters, values)
    return number(0) + number(0x10021000) + b"\0" + packer.element(letters, values)


def son_job(
    about: dict[int, object],
    resources: Iterable[ResourceRequest],
    variables: Iterable[tuple[str, str]],
    arguments: Iterable[str],
    task: int,
    granted: tuple[str, str, int],
) -> bytes:
    """Return a job as 8.1.9 spools it, with other fields by place; `granted`: queue, host, slots.

    The queue instance brings its own list of complexes: a reader that takes any such list for the
    job's request is caught by it.
    """
    packer = Packer(SON)
    queue, host, slots = granted
    instance = f"{queue}@{host}"
    own = packer.list(SON_COMPLEX, 900, {0: "slots", 3: "8", 4: 8.0}, name="")
    place = packer.object("HSSL", 250, {0: host, 1: queue, 2: instance, 3: own})
    where = packer.list(SON_GRANTED, 2100, {0: instance, 2: host, 3: slots, 4: place}, name="")
    requests: list[dict[int, object]] = [
        {0: one.name, 2: 1, 3: one.text, 4: one.value, 6: one.consumable} for one in resources
    ]
    words: list[dict[int, object]] = [{0: word} for word in arguments]
    pairs: list[dict[int, object]] = [{0: name, 1: value} for name, value in variables]
    values: dict[int, object] = {
        **about,
        33: packer.list("SS", 1400, *pairs),
        35: packer.list("S", 2000, *words) if words else None,
        64: packer.list(SON_TASK, 141150, {0: task, 1: 128, 7: where, 8: instance}),
    }
    if requests:  # Grid Engine has no list at all for a job without -l
        values[45] = packer.list(SON_COMPLEX, 900, *requests, name="qstat_l_requests")
    return number(0) + number(0x10020000) + packer.element(SON_JOB, values)
