# SPDX-License-Identifier: Apache-2.0
"""What the running kernel says of its own structures: BTF, the kernel's type format.

Warm. A BPF program reads a structure at offsets that differ from kernel to kernel. The kernel lists
them in `/sys/kernel/btf/vmlinux` (Documentation/bpf/btf.rst), where it was built to.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from struct import error as StructError
from struct import iter_unpack, unpack_from
from typing import Final

STRUCT: Final = 4
UNION: Final = 5
FUNCTION: Final = 12
_MAGIC: Final = 0xEB9F
_ORDER: Final = "<" if sys.byteorder == "little" else ">"
# bytes behind a type's twelve: of its kind, and of each of its members
_BEHIND: Final = {1: 4, 3: 12, 14: 4, 17: 4}
_MEMBER: Final = {STRUCT: 12, UNION: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_KINDS: Final = 19  # of Linux 6.0; another one may have any length
_KIND_BITS: Final = 0x1F
_BITFIELDS: Final = 1 << 31  # a member's offset has its width in the upper eight bits then


class KernelTypes:
    """The types of one BTF file; a ValueError where it is none, or has not what is asked for."""

    def __init__(self, data: bytes) -> None:
        try:
            magic, _, _, head, types, size, strings, length = unpack_from(f"{_ORDER}HBBIIIII", data)
        except StructError as fault:
            raise ValueError(f"no BTF: {fault}") from None
        if magic != _MAGIC:
            raise ValueError("no BTF")
        if len(data) < head + max(types + size, strings + length):
            raise ValueError("BTF is cut short")
        self._types = data[head + types : head + types + size]
        self._strings = data[head + strings : head + strings + length]
        self._places = array("I", self._find_places())

    def type_id(self, kind: int, name: str) -> int:
        """Return the id of a type by its kind and name."""
        wanted = self._strings.find(b"\0%s\0" % name.encode()) + 1
        if wanted:
            for number, at in enumerate(self._places, 1):
                told, info = unpack_from(f"{_ORDER}II", self._types, at)
                if told == wanted and info >> 24 & _KIND_BITS == kind:
                    return number
        raise ValueError(f"this kernel does not tell of {name}")

    def member_offset(self, structure: str, member: str) -> int:
        """Return at which byte of a structure a member is, in anonymous ones within it as well."""
        found = self._find_member(self.type_id(STRUCT, structure), member.encode())
        if found is None or found % 8:
            raise ValueError(f"this kernel does not tell of {structure}.{member}")
        return found // 8

    def _find_member(self, number: int, member: bytes) -> int | None:
        """Return at which bit of a type a member is, None where there is none of that name."""
        at = self._places[number - 1]
        info = unpack_from(f"{_ORDER}I", self._types, at + 4)[0]
        if info >> 24 & _KIND_BITS not in (STRUCT, UNION):
            return None
        own = self._types[at + 12 : at + 12 + 12 * (info & 0xFFFF)]
        anonymous: list[tuple[int, int]] = []
        for name, kind, offset in iter_unpack(f"{_ORDER}III", own):
            bits = int(offset & 0xFFFFFF if info & _BITFIELDS else offset)
            if not name:
                anonymous.append((kind, bits))
            elif self._strings.startswith(member + b"\0", name):
                return bits
        for kind, bits in anonymous:
            inner = self._find_member(kind, member)
            if inner is not None:
                return bits + inner
        return None

    def _find_places(self) -> Iterator[int]:
        """Give where each type is: only the lengths of those before it tell."""
        at, size = 0, len(self._types)
        while at < size:
            info = unpack_from(f"{_ORDER}I", self._types, at + 4)[0] if at + 12 <= size else 0
            kind = info >> 24 & _KIND_BITS
            if not 0 < kind <= _KINDS:
                raise ValueError(f"BTF has a type of an unknown kind: {kind}")
            yield at
            at += 12 + _BEHIND.get(kind, 0) + _MEMBER.get(kind, 0) * (info & 0xFFFF)
        if at != size:
            raise ValueError("BTF is cut short")
