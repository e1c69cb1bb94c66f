# SPDX-License-Identifier: Apache-2.0
"""The job as execd spools it: one JB_Type element (SoGE 8.1.9, libs/sgeobj/sge_job_JB_L.h).

Numbers of names and types of the inner lists are those found in files that a real execd wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.support import cull
from tests.support.cull import Value, make_cull_descriptor

NOT_CONSUMABLE, PER_SLOT, PER_JOB = 0, 1, 2  # CE_consumable: NO, YES, JOB
INT, TIME, MEMORY = 1, 3, 4  # CE_valtype

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
_KINDS = {"u": 3, "s": 8, "b": 6, "d": 2, "l": 9, "o": 10, "h": 12, "-": 11}

JOB_FIELDS = tuple(
    (name, _KINDS[kind]) for name, kind in (field.split(":") for field in _FIELDS.split())
)

# Complex entry, CE_Type: name, shortcut, valtype, stringval, doubleval, relop, consumable,
# default, dominant, pj_stringval, pj_doubleval, pj_dominant, requestable, tagged, urgency_weight.
COMPLEX = make_cull_descriptor(
    900,
    (
        *(0x112708, 0x102608, 0x102003, 0x112008, 0x802, 0x102003, 0x102003, 0x102008),
        *(0x803, 0x808, 0x802, 0x803, 0x102003, 0x803, 0x102008),
    ),
)
VARIABLE = make_cull_descriptor(1400, (0x10708, 0x10008))
STRING_ITEM = make_cull_descriptor(2000, (0x10308,))
RANGE = make_cull_descriptor(1250, (0x10103, 0x10003, 0x10003))
# Array task, JAT_Type, and a granted queue instance in it, JG_Type.
TASK = make_cull_descriptor(
    141150,
    (0x10703, *(0x10003,) * 4, 0x10008, 0x10003, 0x10009, 0x10008, *(0x10003,) * 5, 0x10008)
    + ((0x10009,) * 3 + (0x10003,) + (0x10002,) * 5 + (0x3, 0x10009, 0x10009, 0x9, 0xA, 0x3))
    + (0x10003, 0x2, 0x2, 0x2003, 0x2009),
)
GRANTED = make_cull_descriptor(
    2100, (0x10708, 0x803, 0x1020C, 0x10003, 0x8080A, 0x803, 0x803, *(0x802,) * 6, 0x808)
)
# The part of the queue instance that execd keeps: host, queue, full name, its complex values.
QUEUE = ((250, 0x28220C), (251, 0x282008), (252, 0x280708), (299, 0x281009))

TASK_RUNNING = 128  # JAT_status JRUNNING (sge_ja_task_JAT_L.h)


@dataclass(frozen=True)
class ResourceRequest:
    """One `-l name=text` of a job: `value` as Grid Engine parsed it, and the complex's flag."""

    name: str
    value: float
    text: str
    consumable: int = PER_SLOT
    valtype: int = INT


def pack_job(values: Mapping[str, Value]) -> bytes:
    """Return a spooled job of these JB_ fields (named without JB_); the others are empty."""
    unknown = values.keys() - {name for name, _ in JOB_FIELDS}
    if unknown:
        raise ValueError(f"JB_Type has no {', '.join(sorted(unknown))}")
    types = [kind for _, kind in JOB_FIELDS]
    return cull.pack_buffer(types, [values.get(name) for name, _ in JOB_FIELDS])


def resource_list(resources: Iterable[ResourceRequest]) -> cull.CullList | None:
    """Return JB_hard_resource_list; Grid Engine has none at all for a job without -l."""
    elements = tuple(_complex_element(resource) for resource in resources)
    return cull.CullList("qstat_l_requests", COMPLEX, elements) if elements else None


def variable_list(variables: Mapping[str, str]) -> cull.CullList:
    """Return JB_env_list."""
    return cull.CullList("job_sublist", VARIABLE, tuple(variables.items()))


def string_list(strings: Iterable[str]) -> cull.CullList | None:
    """Return a list of strings, such as JB_job_args."""
    elements = tuple((text,) for text in strings)
    return cull.CullList("No list name specified", STRING_ITEM, elements) if elements else None


def range_list(name: str, first: int, last: int) -> cull.CullList:
    """Return one range of whole numbers, such as JB_ja_structure."""
    return cull.CullList(name, RANGE, ((first, last, 1),))


def task_list(number: int, queue: str, host: str, slots: int) -> cull.CullList:
    """Return JB_ja_tasks with one running task, granted `slots` slots of one queue instance.

    The queue instance brings its own list of complex values: a reader that takes any CE_Type
    list for the job's request is caught by it.
    """
    name = f"{queue}@{host}"
    slots_of_queue = cull.CullList(
        "", COMPLEX, (_complex_element(ResourceRequest("slots", 8, "8", 0, 0)),)
    )
    instance = cull.CullObject(QUEUE, (host, queue, name, slots_of_queue))
    granted = _ordered_fields(GRANTED, {2100: name, 2102: host, 2103: slots, 2104: instance})
    task = _ordered_fields(
        TASK,
        {
            141150: number,
            141151: TASK_RUNNING,
            141157: cull.CullList("", GRANTED, (granted,)),
            141158: name,
        },
    )
    return cull.CullList("cp_ja_task_list", TASK, (task,))


def _complex_element(resource: ResourceRequest) -> tuple[Value, ...]:
    return _ordered_fields(
        COMPLEX,
        {
            900: resource.name,
            902: resource.valtype,
            903: resource.text,
            904: resource.value,
            906: resource.consumable,
        },
    )


def _ordered_fields(
    of_type: tuple[tuple[int, int], ...], values: Mapping[int, Value]
) -> tuple[Value, ...]:
    return tuple(values.get(name) for name, _ in of_type)
