# SPDX-License-Identifier: Apache-2.0
"""Walk the packed job of Open Cluster Scheduler 9: what was asked for, and granted on which host.

Hot, loaded only where a job is not laid out as Son of Grid Engine 8.1.9 does. Source: libs/cull
and libs/sgeobj/cull of 9.0.0 to 9.1.5 and of the branch of 9.2. Elements have no bit field of
changed fields. From 9.1 on an auth string follows the version, and lists have no count: an element
begins with 1, a list ends with 0. One version has several layouts: the one that ends exactly where
the file ends is the job's.
"""

from gpulock.sge.cull import (
    BOOL,
    DOUBLE,
    FREE,
    HOST,
    LIST,
    OBJECT,
    REFERENCE,
    STRING,
    ULONG,
    ULONG64,
    CullReader,
    LayoutError,
    SgeJob,
)

LETTERS = {
    **{"U": ULONG, "S": STRING, "L": LIST, "B": BOOL, "O": OBJECT, "H": HOST, "D": DOUBLE},
    **{"R": REFERENCE, "6": ULONG64},
}
HEAD = "USULLLLLLSSSSSSUS666SUSUSSBUBUULULLLUSOUULLLBL"  # up to JB_request_set_list
NUMBER_FIELD, OWNER_FIELD, UID_FIELD, REQUESTS_FIELD = 0, 20, 21, 45
COUNTED, MARKED = 0x10020000, 0x10021000  # pack.h CULL_VERSION of 9.0, and since 9.1
# (version, types of JB_Type's fields in order, place of JB_ja_tasks)
LAYOUTS = (
    (COUNTED, HEAD + "ULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUULSLL", 60),
    (MARKED, HEAD + "ULSLSSLLLLLLLLLHRLLU66ULLDDDDDDUUUOSLLUUU", 60),
    (MARKED, HEAD + "ULSLSSLLLLLLLLHRLLU66ULDDDDDDUUUOSLLUUU", 59),
)
# The fields of the lists that are read: request sets (JRS_Type), complexes (CE_Type), the begin of
# a task (JAT_Type), what it was granted (GRU_Type) and the ids of that (RESL_Type)
REQUEST_SETS, COMPLEXES, TASKS = "ULLLLSB", "SSUSDUUSUSDUUUSL", "UU66USULL"
GRANTED, IDS = ("USDLH", "USDLLH"), ("SU", "SUUULL")
CE_NAME, CE_DOUBLEVAL, CE_CONSUMABLE = 0, 4, 6
GRU_NAME, GRU_AMOUNT, GRU_IDS = 1, 2, 3  # and GRU_host, the last
RESL_VALUE = 0
RESL_AMOUNT = {"SU": 1, "SUUULL": 3}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.sge.cull import Granted

    Rows = list[list[object]]


class CullTable:
    """A list that was read: the types of its fields as letters, and a row for each element."""

    __slots__ = ("rows", "types")

    def __init__(self, types: str, rows: "Rows") -> None:
        self.types = types
        self.rows = rows


class OcsReader(CullReader):
    """Read packed values as these versions write them, and keep the lists."""

    __slots__ = ("_counted",)

    def __init__(self, data: bytes, counted: bool) -> None:
        super().__init__(data)
        self._counted = counted

    def value(self, kind: int) -> object:
        """Read one value; of an object nothing is kept."""
        if kind == LIST:
            return self.table()
        if kind == REFERENCE:
            return None
        return super().value(kind)

    def element(self, fields: list[tuple[int, int]], own: bool = True) -> list[object]:
        """Read one element of a list or object: its `own` descriptor where it is a free one."""
        if self.number() == FREE:
            if not own:
                raise LayoutError("an element has other fields than its list")
            fields = self.descriptor()
        return [self.value(kind) for _, kind in fields]

    def table(self) -> "CullTable | None":
        """Read a list, None for none."""
        if not self.number():
            return None
        left = self.number() if self._counted else -1
        self.string()
        fields = self.descriptor()
        rows: Rows = []
        while left if self._counted else self.number():
            left -= 1
            rows.append(self.element(fields, own=False))
        return CullTable("".join([type_letter(kind) for _, kind in fields]), rows)


def type_letter(kind: int) -> str:
    """Return the letter of a type, `?` for one that is not known."""
    return next((letter for letter, number in LETTERS.items() if number == kind), "?")


def parse_ocs_job(data: bytes) -> SgeJob:
    """Read a spooled job; raise LayoutError for anything that does not fit exactly one layout."""
    if int.from_bytes(data[:4], "big"):
        raise LayoutError("another version of Grid Engine wrote it")
    version = int.from_bytes(data[4:8], "big")
    found: list[SgeJob] = []
    reason = "another version of Grid Engine wrote it"
    for known, letters, tasks in LAYOUTS:
        if known != version:
            continue
        try:
            found.append(walk_ocs_job(OcsReader(data, known == COUNTED), letters, tasks))
        except (ValueError, RecursionError) as fault:
            reason = f"not a job of Open Cluster Scheduler: {fault}"
    if len(found) != 1:
        raise LayoutError("it fits two layouts" if found else reason)
    return found[0]


def walk_ocs_job(reader: OcsReader, letters: str, tasks: int) -> SgeJob:
    """Read a job of one layout; raise ValueError where it does not fit, or does not end there."""
    reader.number()  # pad and version
    if reader.number() == MARKED:
        reader.string()
    if reader.number() == FREE and [kind for _, kind in reader.descriptor()] != [
        LETTERS[letter] for letter in letters if letter != "R"
    ]:
        raise LayoutError("other fields")
    values = [reader.value(LETTERS[letter]) for letter in letters]
    if not reader.at_end():
        raise LayoutError("it does not end with the file")
    number, owner, uid = values[NUMBER_FIELD], values[OWNER_FIELD], values[UID_FIELD]
    assert isinstance(number, int) and isinstance(owner, bytes) and isinstance(uid, int)
    job = SgeJob(number, decode_cull_text(owner), uid, [])
    for scope in table_rows(values[REQUESTS_FIELD], REQUEST_SETS):
        for row in table_rows(scope[1], COMPLEXES):
            name, amount, flag = row[CE_NAME], row[CE_DOUBLEVAL], row[CE_CONSUMABLE]
            assert isinstance(name, bytes) and isinstance(amount, float) and isinstance(flag, int)
            job.requests.append((decode_cull_text(name), amount, flag))
    rows = table_rows(values[tasks], TASKS)
    if len(rows) != 1:
        raise LayoutError(f"{len(rows)} tasks, where execd writes a file for each")
    job.granted = [granted_resource(row) for row in table_rows(rows[0][8], *GRANTED)]
    return job


def table_rows(value: object, *types: str) -> "Rows":
    """Return the rows of a list, none where there is none; raise LayoutError for other fields."""
    if value is None:
        return []
    assert isinstance(value, CullTable)
    if not (value.types in types or (types == (TASKS,) and value.types.startswith(TASKS))):
        raise LayoutError(f"a list of fields {value.types}")
    return value.rows


def granted_resource(row: list[object]) -> "Granted":
    """Return the complex, the amount, the (id, times) of an RSMAP, and the host.

    Raises LayoutError.
    """
    name, amount, table, host = row[GRU_NAME], row[GRU_AMOUNT], row[GRU_IDS], row[-1]
    assert isinstance(name, bytes) and isinstance(amount, float) and isinstance(host, bytes)
    ids: list[tuple[str, int]] = []
    for one in table_rows(table, *IDS):
        assert isinstance(table, CullTable)
        value, times = one[RESL_VALUE], one[RESL_AMOUNT[table.types]]
        assert isinstance(value, bytes) and isinstance(times, int)
        ids.append((decode_cull_text(value), times))
    return decode_cull_text(name), amount, ids, decode_cull_text(host)


def decode_cull_text(value: bytes) -> str:
    """Return a string of the job's as text, whatever bytes it has."""
    return value.decode("utf-8", "surrogateescape")
