# SPDX-License-Identifier: Apache-2.0
"""The job as execd of Son of Grid Engine spools it: one JB_Type element in a CULL pack buffer.

SoGE 8.1.9, libs/cull/cull_pack.c and pack.c, libs/sgeobj/sge_job_JB_L.h. Numbers are big endian; a
string ends with a NUL and a missing one is empty; a list or object begins with a flag that says
whether there is one. A list carries its own descriptor, number and type of each field; the
outermost element does not, so a reader must know its version. Numbers and types of the inner lists
are those found in files that a real execd wrote. The job of Open Cluster Scheduler is in ocs_jobs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Union

from tests.support.pairs import zip_equal

NOT_CONSUMABLE, PER_SLOT, PER_JOB = 0, 1, 2  # CE_consumable: NO, YES, JOB
INT = 1  # CE_valtype
VERSION = 0x10020000  # CULL_VERSION of 6.2 and of all Son of Grid Engine releases
BOUND, OF_OBJECT = 2, 8  # status of an element: in a list, a sub-object (cull_listP.h)
TASK_RUNNING = 128  # JAT_status JRUNNING (sge_ja_task_JAT_L.h)

# Types of values, libs/cull/cull_list.h: the low byte of a descriptor's second number.
DOUBLE, STRING, LIST, OBJECT, REF, HOST = 2, 8, 9, 10, 11, 12
TYPE_MASK = 0xFF

# The 85 fields of JB_Type in order: u number, s string, b bool, d double, l list, o object,
# h host, - a reference, which takes no room.
_FIELDS = """
job_number:u job_name:s version:u jid_request_list:l jid_predecessor_list:l jid_successor_list:l
ja_ad_request_list:l ja_ad_predecessor_list:l ja_ad_successor_list:l session:s project:s
department:s directive_prefix:s exec_file:s script_file:s script_size:u script_ptr:s
submission_time:u execution_time:u deadline:u owner:s uid:u group:s gid:u account:s cwd:s
notify:b type:u reserve:b priority:u jobshare:u shell_list:l verify:u env_list:l context:l
job_args:l checkpoint_attr:u checkpoint_name:s checkpoint_object:o checkpoint_interval:u
restart:u stdout_path_list:l stderr_path_list:l stdin_path_list:l merge_stderr:b
hard_resource_list:l soft_resource_list:l hard_queue_list:l soft_queue_list:l mail_options:u
mail_list:l pe:s pe_range:l master_hard_queue_list:l tgt:s cred:s ja_structure:l ja_n_h_ids:l
ja_u_h_ids:l ja_s_h_ids:l ja_o_h_ids:l ja_a_h_ids:l ja_z_ids:l ja_template:l ja_tasks:l host:h
category:- user_list:l job_identifier_list:l verify_suitable_queues:u soft_wallclock_gmt:u
hard_wallclock_gmt:u override_tickets:u qs_args:l path_aliases:l urg:d nurg:d nppri:d rrcontr:d
dlcontr:d wtcontr:d ar:u pty:u ja_task_concurrency:u binding:l
"""
_KINDS = {"u": 3, "s": STRING, "b": 6, "d": DOUBLE, "l": LIST, "o": OBJECT, "h": HOST, "-": REF}
JOB_FIELDS = [
    (name, _KINDS[kind]) for name, kind in (field.split(":") for field in _FIELDS.split())
]

Descriptor = Sequence[tuple[int, int]]
Value = Union[int, float, str, bytes, None]  # bytes: a list or object, packed already
Row = Mapping[int, Value]  # by place


def _descriptor(first: int, *kinds: int) -> Descriptor:
    return tuple(enumerate(kinds, first))


# CE_Type: name, shortcut, valtype, stringval, doubleval, relop, consumable, default, dominant,
# pj_stringval, pj_doubleval, pj_dominant, requestable, tagged, urgency_weight.
COMPLEX = _descriptor(
    *(900, 0x112708, 0x102608, 0x102003, 0x112008, 0x802, 0x102003, 0x102003, 0x102008),
    *(0x803, 0x808, 0x802, 0x803, 0x102003, 0x803, 0x102008),
)
VARIABLE = _descriptor(1400, 0x10708, 0x10008)
STRING_ITEM = _descriptor(2000, 0x10308)
RANGE = _descriptor(1250, 0x10103, 0x10003, 0x10003)
# Array task, JAT_Type, and a granted queue instance in it, JG_Type.
TASK = _descriptor(
    *(141150, 0x10703, *(0x10003,) * 4, 0x10008, 0x10003, 0x10009, 0x10008, *(0x10003,) * 5),
    *(0x10008, *(0x10009,) * 3, 0x10003, *(0x10002,) * 5, 0x3, 0x10009, 0x10009, 0x9, 0xA, 0x3),
    *(0x10003, 0x2, 0x2, 0x2003, 0x2009),
)
GRANTED = _descriptor(
    *(2100, 0x10708, 0x803, 0x1020C, 0x10003, 0x8080A, 0x803, 0x803, *(0x802,) * 6, 0x808)
)
# The part of the queue instance that execd keeps: host, queue, full name, its complex values.
QUEUE = ((250, 0x28220C), (251, 0x282008), (252, 0x280708), (299, 0x281009))


class ResourceRequest(NamedTuple):
    """One `-l name=text` of a job: `value` as Grid Engine parsed it, and the complex's flag."""

    name: str
    value: float
    text: str
    consumable: int = PER_SLOT


def pack_job(values: Mapping[str, Value]) -> bytes:
    """Return a spooled job of these JB_ fields (named without JB_); the others are empty."""
    names, kinds = zip(*JOB_FIELDS)
    if unknown := values.keys() - {*names}:
        raise ValueError(f"JB_Type has no {', '.join(sorted(unknown))}")
    fields = pack_element(kinds, [values.get(name) for name in names])
    return pack_number(0) + pack_number(VERSION) + fields


def pack_requests(resources: Iterable[ResourceRequest]) -> bytes | None:
    """Return JB_hard_resource_list; Grid Engine has none at all for a job without -l."""
    rows: list[Row] = [
        {0: one.name, 2: INT, 3: one.text, 4: one.value, 6: one.consumable} for one in resources
    ]
    return pack_list("qstat_l_requests", COMPLEX, *rows) if rows else None


def pack_variables(variables: Iterable[tuple[str, str]]) -> bytes:
    """Return JB_env_list."""
    return pack_list("job_sublist", VARIABLE, *({0: name, 1: value} for name, value in variables))


def pack_arguments(words: Iterable[str]) -> bytes | None:
    """Return JB_job_args."""
    rows: list[Row] = [{0: word} for word in words]
    return pack_list("No list name specified", STRING_ITEM, *rows) if rows else None


def pack_range(name: str, number: int) -> bytes:
    """Return a range of one whole number, such as JB_ja_structure."""
    return pack_list(name, RANGE, {0: number, 1: number, 2: 1})


def pack_tasks(number: int, queue: str, host: str, slots: int) -> bytes:
    """Return JB_ja_tasks with one running task, granted `slots` slots of one queue instance.

    The queue instance brings its own list of complex values: a reader that takes any CE_Type
    list for the job's request is caught by it.
    """
    name = f"{queue}@{host}"
    values = pack_list("", COMPLEX, {0: "slots", 3: "8", 4: 8})
    instance = pack_object(QUEUE, {0: host, 1: queue, 2: name, 3: values})
    granted = pack_list("", GRANTED, {0: name, 2: host, 3: slots, 4: instance})
    task: Row = {0: number, 1: TASK_RUNNING, 7: granted, 8: name}
    return pack_list("cp_ja_task_list", TASK, task)


def pack_list(name: str, descriptor: Descriptor, *rows: Row) -> bytes:
    """Return a list that exists."""
    head = pack_number(1, len(rows)) + pack_string(name) + pack_number(1)
    return head + pack_descriptor(descriptor) + b"".join(pack_row(descriptor, row) for row in rows)


def pack_object(descriptor: Descriptor, row: Row) -> bytes:
    """Return a sub-object that exists."""
    return pack_number(1) + pack_descriptor(descriptor) + pack_row(descriptor, row, OF_OBJECT)


def pack_descriptor(descriptor: Descriptor) -> bytes:
    """Return a descriptor: how many fields, then number and type of each."""
    return pack_number(len(descriptor)) + b"".join(pack_number(*pair) for pair in descriptor)


def pack_row(descriptor: Descriptor, row: Row, status: int = BOUND) -> bytes:
    """Return an element of which some fields are filled."""
    kinds = [kind for _, kind in descriptor]
    return pack_element(kinds, [row.get(place) for place in range(len(kinds))], status)


def pack_element(kinds: Sequence[int], values: Sequence[Value], status: int = BOUND) -> bytes:
    """Return one element: status, the bits of changed fields (all clear), the fields."""
    changed = pack_number(len(kinds)) + bytes((len(kinds) + 7) // 8)
    fields = [pack_value(kind & TYPE_MASK, value) for kind, value in zip_equal(kinds, values)]
    return pack_number(status) + changed + b"".join(fields)


def pack_value(kind: int, value: Value) -> bytes:
    """Return one field; None is its zero."""
    if kind in (STRING, HOST):
        return pack_string(str(value or ""))
    if kind == DOUBLE:
        return struct.pack(">d", value or 0.0)
    if kind == REF:
        return b""
    return value if isinstance(value, bytes) else pack_number(int(value or 0))


def pack_string(value: str) -> bytes:
    """Return a string; raise ValueError where it holds the byte that ends one."""
    data = value.encode(errors="surrogateescape")
    if b"\0" in data:
        raise ValueError(f"{value!r} holds a NUL")
    return data + b"\0"


def pack_number(*values: int) -> bytes:
    """Return unsigned numbers of 32 bits."""
    return struct.pack(f">{len(values)}I", *values)
