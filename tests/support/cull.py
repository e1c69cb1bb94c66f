# SPDX-License-Identifier: Apache-2.0
"""Pack values as Grid Engine's CULL does (SoGE 8.1.9, libs/cull/cull_pack.c and pack.c).

Numbers are big endian; a string ends with a NUL and a missing one is empty; a double is an XDR
one, eight bytes; a list or object begins with a flag that says whether there is one. A list
carries its own descriptor, the type of each field; the outermost element does not, so a reader
must know its version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

VERSION = 0x10020000  # CULL_VERSION of 6.2 and of all Son of Grid Engine releases

# Multi types, libs/cull/cull_list.h; the low byte of a descriptor's second number.
DOUBLE, ULONG, BOOL, STRING, LIST, OBJECT, REF, HOST = 2, 3, 6, 8, 9, 10, 11, 12
TYPE_MASK = 0xFF

BOUND, OF_OBJECT = 2, 8  # status of an element: in a list, a sub-object (cull_listP.h)


@dataclass(frozen=True)
class CullList:
    """A list: its name, its descriptor as (name, type) numbers, its elements' fields."""

    name: str
    descriptor: tuple[tuple[int, int], ...]
    elements: tuple[Sequence[Value], ...]
    changed: int = 1
    status: int = BOUND


@dataclass(frozen=True)
class CullObject:
    """A sub-object: its descriptor and its fields."""

    descriptor: tuple[tuple[int, int], ...]
    fields: Sequence[Value]
    status: int = OF_OBJECT


Value = Union[int, float, str, CullList, CullObject, None]


def make_cull_descriptor(first: int, types: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the descriptor of a type whose fields are numbered from `first` on."""
    return tuple((first + number, kind) for number, kind in enumerate(types))


def pack_buffer(types: Sequence[int], fields: Sequence[Value]) -> bytes:
    """Return a whole pack buffer that holds one element, as execd spools a job."""
    return pack_number(0) + pack_number(VERSION) + pack_element(types, fields, BOUND)


def pack_element(types: Sequence[int], fields: Sequence[Value], status: int) -> bytes:
    """Return one element: status, the bits of changed fields (all clear), the fields."""
    if len(types) != len(fields):
        raise ValueError(f"{len(fields)} fields for a type of {len(types)}")
    changed = pack_number(len(types)) + bytes((len(types) + 7) // 8)
    packed = [pack_value(kind, value) for kind, value in zip(types, fields)]
    return pack_number(status) + changed + b"".join(packed)


def pack_value(kind: int, value: Value) -> bytes:
    """Return one field of type `kind`; None is its zero."""
    kind &= TYPE_MASK
    if kind in (ULONG, BOOL) and (value is None or isinstance(value, int)):
        return pack_number(value or 0)
    if kind in (STRING, HOST) and (value is None or isinstance(value, str)):
        return pack_string(value or "")
    if kind == DOUBLE and (value is None or isinstance(value, (int, float))):
        return struct.pack(">d", value or 0.0)
    if kind == LIST and (value is None or isinstance(value, CullList)):
        return pack_number(0) if value is None else pack_list(value)
    if kind == OBJECT and (value is None or isinstance(value, CullObject)):
        return pack_number(0) if value is None else pack_object(value)
    if kind == REF and value is None:
        return b""
    raise TypeError(f"{value!r} is not of CULL type {kind}")


def pack_list(value: CullList) -> bytes:
    """Return a list that exists."""
    types = [kind for _, kind in value.descriptor]
    head = pack_number(1) + pack_number(len(value.elements)) + pack_string(value.name)
    return b"".join(
        (
            head,
            pack_number(value.changed),
            pack_descriptor(value.descriptor),
            *(pack_element(types, fields, value.status) for fields in value.elements),
        )
    )


def pack_object(value: CullObject) -> bytes:
    """Return a sub-object that exists."""
    types = [kind for _, kind in value.descriptor]
    element = pack_element(types, value.fields, value.status)
    return pack_number(1) + pack_descriptor(value.descriptor) + element


def pack_descriptor(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Return a descriptor: how many fields, then name and type of each."""
    return pack_number(len(pairs)) + b"".join(
        pack_number(name) + pack_number(kind) for name, kind in pairs
    )


def pack_string(value: str) -> bytes:
    """Return a string; raise ValueError where it holds the byte that ends one."""
    data = value.encode(errors="surrogateescape")
    if b"\0" in data:
        raise ValueError(f"{value!r} holds a NUL")
    return data + b"\0"


def pack_number(value: int) -> bytes:
    """Return an unsigned number of 32 bits."""
    return struct.pack(">I", value)
