# SPDX-License-Identifier: Apache-2.0
"""Read the packed job that execd spools: what was asked for and, of newer releases, granted where.

Hot. Source: libs/cull (packing) and libs/sgeobj (order of fields) of Son of Grid Engine 8.1.9, and
of Open Cluster Scheduler 9.0.0 to 9.1.5 and the branch of 9.2. Integers have 32 bits, big endian;
strings end with NUL, doubles are XDR's, and a list brings the types of its fields. A version has
several layouts: the one that ends exactly where the file ends is the job's. The structure is
walked, never searched: names, arguments and environment of a job are bytes that its owner chose.
"""

FREE = 1  # status of an element that carries its own descriptor (cull_list.h)
DOUBLE, ULONG, BOOL, STRING, LIST, OBJECT, REFERENCE, HOST, ULONG64 = 2, 3, 6, 8, 9, 10, 11, 12, 13
NUMBERS, STRINGS = (ULONG, BOOL), (STRING, HOST)
LETTERS = {
    **{"U": ULONG, "S": STRING, "L": LIST, "B": BOOL, "O": OBJECT, "H": HOST, "D": DOUBLE},
    **{"R": REFERENCE, "6": ULONG64},
}
TYPES = {number: letter for letter, number in LETTERS.items()}
# How a release packs. Of 8.1.9 an element has a bit field of changed fields, a list has a number
# behind its name. With a mark, an element of a list begins with 1 and a list ends with 0; else a
# list has a count.
BITS, PLAIN, MARKED = range(3)
OLD, NEW = 0x10020000, 0x10021000  # pack.h CULL_VERSION: of 8.1.9 and 9.0, and since 9.1
HEAD = "USULLLLLLSSSSSSUS666SUSUSSBUBUULULLLUSOUULLLBL"  # up to JB_request_set_list
# Version, packing, types of JB_Type's fields in order, place of JB_ja_tasks where grants are in it.
LAYOUTS = (
    (OLD, BITS, HEAD.replace("6", "U") + "LLLULSLLSSLLLLLLLLLHRLLUUUULLDDDDDDUUUL", 0),  # 8.1.9
    (OLD, PLAIN, HEAD + "ULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUULSLL", 60),  # 9.0
    (NEW, MARKED, HEAD + "ULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUUOSLLUUU", 60),  # 9.1
    (NEW, MARKED, HEAD + "ULSLSSLLLLLLLLHRLLU66ULDDDDDDUUUOSLLUUU", 59),  # 9.2
)
# Places in JB_Type, the same in each layout; requests are JB_hard_resource_list in 8.1.9
JOB_NUMBER, JOB_OWNER, JOB_UID, JOB_REQUESTS = 0, 20, 21, 45
# The fields of the lists that are read: complexes (CE_Type), request sets (JRS_Type), the begin of
# a task (JAT_Type), what it was granted (GRU_Type) and the ids of that (RESL_Type)
COMPLEXES, REQUEST_SETS, TASKS = ("SSUSDUUSUSDUUUS", "SSUSDUUSUSDUUUSL"), "ULLLLSB", "UU66USULL"
GRANTED, IDS = ("USDLH", "USDLLH"), ("SU", "SUUULL")
CE_NAME, CE_DOUBLEVAL, CE_CONSUMABLE = 0, 4, 6
JRS_REQUESTS, JAT_GRANTED = 1, 8
GRU_NAME, GRU_AMOUNT, GRU_IDS = 1, 2, 3  # and GRU_host, the last
RESL_VALUE = 0
RESL_AMOUNT = {2: 1, 6: 3}  # by the number of fields
MOST_GPUS = 4096  # more is a typing error, and too much for a message
MOST_FIELDS = 200  # the largest list type has 96
OTHER_VERSION = "another version of Grid Engine wrote it"

TYPE_CHECKING = False
if TYPE_CHECKING:
    Granted = tuple[str, float, list[tuple[str, int]], str]
    Rows = list[list[object]]
    Table = tuple[str, Rows]


class LayoutError(ValueError):
    """Say that a job file is not laid out as a known version of Grid Engine does."""


class SgeJob:
    """What was read of a job: number, owner, uid, hard requests as (name, value, consumable).

    `granted` is what Open Cluster Scheduler granted: (name, amount, [(id, times)], host). It is
    None in 8.1.9, which writes none of it.
    """

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

    def __init__(self, data: bytes, packing: int) -> None:
        self._data = data
        self._packing = packing
        self.at = 0

    def number(self) -> int:
        """Read a 32-bit unsigned integer; raise LayoutError beyond the end."""
        return int.from_bytes(self._take(4), "big")

    def _take(self, count: int) -> bytes:
        taken = self._data[self.at : self.at + count]
        if len(taken) < count:
            raise LayoutError("it ends too early")
        self.at += count
        return taken

    def at_end(self) -> bool:
        """Return whether everything was read, and no more."""
        return self.at == len(self._data)

    def string(self) -> bytes:
        """Read a string; a missing one reads as empty."""
        end = self._data.index(b"\0", self.at)
        value = self._data[self.at : end]
        self.at = end + 1
        return value

    def descriptor(self) -> list[int]:
        """Read the type of each field that is written of an element."""
        count = self.number()
        if not 0 < count <= MOST_FIELDS:
            raise LayoutError(f"a descriptor of {count} fields")
        pairs = self._take(8 * count)  # name and type of each, whose last byte is the type
        return [kind for kind in pairs[7::8] if kind != REFERENCE]  # which takes no room

    def value(self, kind: int) -> object:
        """Read one value; of an object nothing is kept."""
        if kind in NUMBERS:
            return self.number()
        if kind in STRINGS:
            return self.string()
        if kind == LIST:
            return self.table()
        if kind == DOUBLE:
            value: float = memoryview(self._take(8)[::-1]).cast("d")[
                0
            ]  # of a little-endian machine
            return value
        if kind == OBJECT:
            if self.number():
                self.element(self.descriptor())
        elif kind == ULONG64:
            self.at += 8
        elif kind != REFERENCE:
            raise LayoutError(f"type {kind}")
        return None

    def element(self, kinds: list[int], own: bool = True) -> list[object]:
        """Read one element; a free one brings a descriptor, which it must not unless `own`."""
        if self.number() == FREE:
            if not own:
                raise LayoutError("an element has other fields than its list")
            kinds = self.descriptor()
        self.skip_bits()
        return [self.value(kind) for kind in kinds]

    def skip_bits(self) -> int:
        """Skip the bit field of changed fields; return how many fields it is of."""
        bits = self.number() if self._packing == BITS else 0
        self.at += (bits + 7) // 8
        return bits

    def table(self) -> "Table | None":
        """Read a list as types of fields in letters and a row for each element; None for none."""
        if not self.number():
            return None
        left = -1 if self._packing == MARKED else self.number()
        self.string()
        if self._packing == BITS:
            self.number()
        kinds = self.descriptor()
        rows: Rows = []
        while self.number() if self._packing == MARKED else left:
            left -= 1
            rows.append(self.element(kinds, own=False))
        return "".join([TYPES.get(kind, "?") for kind in kinds]), rows


def parse_spooled_job(data: bytes) -> SgeJob:
    """Return a spooled job; raise LayoutError for anything that does not fit exactly one layout."""
    jobs: list[SgeJob] = []
    reason = OTHER_VERSION
    for version, packing, letters, tasks in LAYOUTS:
        if int.from_bytes(data[:8], "big") != version:  # the first four bytes are 0
            continue
        try:
            jobs.append(read_job_of_layout(CullReader(data, packing), letters, tasks))
        except (ValueError, RecursionError) as fault:
            if reason == OTHER_VERSION:
                reason = f"not a job of a known Grid Engine: {fault}"
    if len(jobs) != 1:
        raise LayoutError("it fits two layouts" if jobs else reason)
    return jobs[0]


def read_job_of_layout(reader: CullReader, letters: str, tasks: int) -> SgeJob:
    """Return a job of one layout; raise ValueError where it does not fit, or does not end there."""
    kinds = [LETTERS[letter] for letter in letters]
    reader.number()  # pad and version
    if reader.number() == NEW:
        reader.string()  # an auth string
    if reader.number() == FREE and reader.descriptor() != [k for k in kinds if k != REFERENCE]:
        raise LayoutError("other fields")
    if reader.skip_bits() not in (0, len(letters)):
        raise LayoutError("more or fewer fields")
    values = [reader.value(kind) for kind in kinds]
    if not reader.at_end():
        raise LayoutError("it does not end with the file")
    number, owner, uid = values[JOB_NUMBER], values[JOB_OWNER], values[JOB_UID]
    assert isinstance(number, int) and isinstance(owner, bytes) and isinstance(uid, int)
    asked = values[JOB_REQUESTS]
    if not tasks:
        return SgeJob(number, decode_cull_text(owner), uid, list_requests(asked))
    job = SgeJob(number, decode_cull_text(owner), uid, [])
    for scope in table_rows(asked, REQUEST_SETS):
        job.requests += list_requests(scope[JRS_REQUESTS])
    rows = table_rows(values[tasks], TASKS)
    if len(rows) != 1:
        raise LayoutError(f"{len(rows)} tasks, where execd writes a file for each")
    job.granted = [granted_resource(row) for row in table_rows(rows[0][JAT_GRANTED], *GRANTED)]
    return job


def table_rows(value: object, *types: str) -> "Rows":
    """Return the rows of a list, none where there is none; raise LayoutError for other fields."""
    if value is None:
        return []
    assert isinstance(value, tuple)
    table: Table = value
    written, rows = table
    if not (written in types or (types == (TASKS,) and written.startswith(TASKS))):
        raise LayoutError(f"a list of fields {written}")
    return rows


def list_requests(value: object) -> list[tuple[str, float, int]]:
    """Return the requests of a list of complexes; raise LayoutError."""
    requests: list[tuple[str, float, int]] = []
    for row in table_rows(value, *COMPLEXES):
        name, amount, flag = row[CE_NAME], row[CE_DOUBLEVAL], row[CE_CONSUMABLE]
        assert isinstance(name, bytes) and isinstance(amount, float) and isinstance(flag, int)
        requests.append((decode_cull_text(name), amount, flag))
    return requests


def granted_resource(row: list[object]) -> "Granted":
    """Return the complex, the amount, the (id, times) of an RSMAP, and the host.

    Raises LayoutError.
    """
    name, amount, table, host = row[GRU_NAME], row[GRU_AMOUNT], row[GRU_IDS], row[-1]
    assert isinstance(name, bytes) and isinstance(amount, float) and isinstance(host, bytes)
    ids: list[tuple[str, int]] = []
    for one in table_rows(table, *IDS):
        value, times = one[RESL_VALUE], one[RESL_AMOUNT[len(one)]]
        assert isinstance(value, bytes) and isinstance(times, int)
        ids.append((decode_cull_text(value), times))
    return decode_cull_text(name), amount, ids, decode_cull_text(host)


def decode_cull_text(value: bytes) -> str:
    """Return a string of the job's as text, whatever bytes it has."""
    return value.decode("utf-8", "surrogateescape")
