# SPDX-License-Identifier: Apache-2.0
"""Walk the packed job that execd spools, to find what was asked for without qmaster.

Hot. Source: Son of Grid Engine 8.1.9, libs/cull/cull_pack.c and pack.c for the packing (32-bit
integers big endian, strings ended by NUL, XDR doubles, lists with their own descriptor) and
libs/sgeobj/sge_job_JB_L.h for the order of a job's fields. The structure is walked, never
searched: names, arguments and environment of a job are bytes that its owner chose.
"""

from _struct import unpack_from  # the C module: its Python face costs 4 ms

MOST = 4096  # GPUs: more is a typing error, and too much for a message
VERSION = 0x10020000  # pack.h CULL_VERSION
FREE = 1  # status of an element that carries its own descriptor (cull_list.h)
DOUBLE, ULONG, BOOL, STRING, LIST, OBJECT, REFERENCE, HOST, ULONG64 = 2, 3, 6, 8, 9, 10, 11, 12, 13
# the type of each field of JB_Type, in order; L list, U ulong, S string, B bool, O object
JOB_FIELDS = (
    "USULLLLLLSSSSSSUSUUUSUSUSSBUBUULULLLUSOUULLLB"  # up to JB_merge_stderr
    "L"  # JB_hard_resource_list
)
JOB_FIELD_COUNT = 85
NUMBER_FIELD, OWNER_FIELD, UID_FIELD = 0, 20, 21
LETTERS = {"U": ULONG, "S": STRING, "L": LIST, "B": BOOL, "O": OBJECT}
# fields of CE_Type (sge_centry_CE_L.h), by their offset in the list's descriptor
CE_FIRST, CE_COUNT = 900, 15
CE_NAME, CE_DOUBLEVAL, CE_CONSUMABLE = 0, 4, 6
CE_TYPES = (8, 8, 3, 8, 2, 3, 3, 8, 3, 8, 2, 3, 3, 3, 8)

TYPE_CHECKING = False
if TYPE_CHECKING:
    Granted = tuple[str, float, list[tuple[str, int]], str]


class LayoutError(ValueError):
    """Say that a job file is not laid out as this version of Grid Engine does."""


class SgeJob:
    """What was read of a job: number, owner, uid, hard requests as (name, value, consumable).

    `granted` is what Open Cluster Scheduler granted: (name, amount, [(id, times)], host).
    """

    __slots__ = ("granted", "number", "owner", "requests", "uid")

    def __init__(
        self, number: int, owner: str, uid: int, requests: list[tuple[str, float, int]]
    ) -> None:
        self.number = number
        self.owner = owner
        self.uid = uid
        self.requests = requests
        self.granted: "list[Granted] | None" = None


class CullReader:
    """Read packed values one after the other."""

    __slots__ = ("_data", "at")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def number(self) -> int:
        """Read a 32-bit unsigned integer; raise LayoutError beyond the end."""
        self.at += 4
        if self.at > len(self._data):
            raise LayoutError("it ends too early")
        return int.from_bytes(self._data[self.at - 4 : self.at], "big")

    def at_end(self) -> bool:
        """Return whether everything was read, and no more."""
        return self.at == len(self._data)

    def string(self) -> bytes:
        """Read a string; a missing one reads as empty."""
        end = self._data.index(b"\0", self.at)
        value = self._data[self.at : end]
        self.at = end + 1
        return value

    def descriptor(self) -> list[tuple[int, int]]:
        """Read the (name, type) of each field that is written of an element."""
        count = self.number()
        if not 0 < count <= 200:  # noqa: PLR2004 (the largest list type has 96 fields)
            raise LayoutError(f"a descriptor of {count} fields")
        fields = [(self.number(), self.number() & 0xFF) for _ in range(count)]
        return [(name, kind) for name, kind in fields if kind != REFERENCE]  # takes no room

    def value(self, kind: int) -> object:
        """Read one value; lists and objects are walked and dropped."""
        if kind in (ULONG, BOOL):
            return self.number()
        if kind in (STRING, HOST):
            return self.string()
        if kind == DOUBLE:
            self.at += 8
            if self.at > len(self._data):
                raise LayoutError("it ends too early")
            value: float = unpack_from(">d", self._data, self.at - 8)[0]
            return value
        if kind == LIST:
            self.elements()
        elif kind == OBJECT:
            if self.number():
                fields = self.descriptor()
                self.element(fields)
        elif kind == ULONG64:
            self.at += 8
        else:
            raise LayoutError(f"type {kind}")
        return None

    def element(self, fields: list[tuple[int, int]], own: bool = True) -> list[object]:
        """Read one element of a list or object: its `own` descriptor where it is a free one."""
        if self.number() == FREE:
            if not own:
                raise LayoutError("a request has other fields")
            fields = self.descriptor()
        bits = self.number()
        self.at += (bits + 7) // 8  # the bit field of changed fields
        return [self.value(kind) for _, kind in fields]

    def elements(self, types: tuple[int, ...] = (), first: int = 0) -> list[list[object]]:
        """Read a list; with `types`, raise LayoutError unless it has just those fields."""
        if not self.number():
            return []
        count = self.number()
        self.string()
        self.number()
        fields = self.descriptor()
        if types and fields != [(first + n, kind) for n, kind in enumerate(types)]:
            raise LayoutError("the resource list has other fields")
        if count > len(self._data):
            raise LayoutError(f"a list of {count} elements")
        if types:
            return [self.element(fields, own=False) for _ in range(count)]
        for _ in range(count):
            self.element(fields)
        return []


def parse_cull_job(data: bytes) -> SgeJob:
    """Read a spooled job; raise LayoutError for anything that does not fit."""
    reader = CullReader(data)
    try:
        if reader.number() != 0 or reader.number() != VERSION:
            raise LayoutError("another version of Grid Engine wrote it")
        status = reader.number()
        if status == FREE or reader.number() != JOB_FIELD_COUNT:
            raise LayoutError("not a job of Grid Engine 8.1.9")
        reader.at += (JOB_FIELD_COUNT + 7) // 8
        values = [reader.value(LETTERS[letter]) for letter in JOB_FIELDS[:-1]]
        rows = reader.elements(CE_TYPES, CE_FIRST)
    except (ValueError, RecursionError) as fault:
        raise LayoutError(f"not a job of Grid Engine 8.1.9: {fault}") from fault
    number, name, uid = values[NUMBER_FIELD], values[OWNER_FIELD], values[UID_FIELD]
    assert isinstance(number, int) and isinstance(name, bytes) and isinstance(uid, int)
    requests: list[tuple[str, float, int]] = []
    for row in rows:
        asked, amount, flag = row[CE_NAME], row[CE_DOUBLEVAL], row[CE_CONSUMABLE]
        assert isinstance(asked, bytes) and isinstance(amount, float) and isinstance(flag, int)
        requests.append((asked.decode("utf-8", "surrogateescape"), amount, flag))
    return SgeJob(number, name.decode("utf-8", "surrogateescape"), uid, requests)
