# SPDX-License-Identifier: Apache-2.0
"""`prolog/clean`: start a program without the job's environment, whatever that holds.

Grid Engine starts a hook as root in the job's environment. The loader and the C library of any
ordinary program read that first: `GLIBC_TUNABLES` alone ends `/usr/bin/env`, and the queue with it.
So the first program has neither. It keeps SGE_JOBEXIT_STAT, which the site's own epilog may read,
and becomes its first argument. It ends with 100 (job in error) where it cannot.

Each line of code is one instruction, as its assembler prints it; the tests assemble them again.
"""

from __future__ import annotations

import os
import struct
from typing import Final

_BASE: Final = 0x400000
_ALIGN: Final = 0x10000  # the largest page of aarch64
_PROGRAM_HEADERS: Final = 2
_EM: Final = {"x86_64": 62, "aarch64": 183}  # elf.h, e_machine
# argc, argv, then envp stand on the stack; the words compared are SGE_JOBE and XIT_STAT.
CODE: Final = {
    "x86_64": (
        ("488b0c24", "mov rcx, [rsp]"),
        ("488d742410", "lea rsi, [rsp+16]"),
        ("488d14ce", "lea rdx, [rsi+rcx*8]"),
        ("48b85347455f4a4f4245", "movabs rax, 0x45424f4a5f454753"),
        ("48bb5849545f53544154", "movabs rbx, 0x544154535f544958"),
        ("488b3a", "1: mov rdi, [rdx]"),
        ("4885ff", "test rdi, rdi"),
        ("741f", "jz 4f"),
        ("483907", "cmp [rdi], rax"),
        ("750c", "jne 2f"),
        ("48395f08", "cmp [rdi+8], rbx"),
        ("7506", "jne 2f"),
        ("807f103d", "cmp byte ptr [rdi+16], 61"),
        ("7406", "je 3f"),
        ("4883c208", "2: add rdx, 8"),
        ("ebe1", "jmp 1b"),
        ("48c7420800000000", "3: mov qword ptr [rdx+8], 0"),
        ("488b3e", "4: mov rdi, [rsi]"),
        ("b83b000000", "mov eax, 59"),  # execve
        ("0f05", "syscall"),
        ("bf64000000", "mov edi, 100"),
        ("b83c000000", "mov eax, 60"),  # exit
        ("0f05", "syscall"),
    ),
    "aarch64": (
        ("e30340f9", "ldr x3, [sp]"),
        ("e1430091", "add x1, sp, #16"),
        ("220c038b", "add x2, x1, x3, lsl #3"),
        ("c4020058", "ldr x4, 5f"),
        ("e5020058", "ldr x5, 6f"),
        ("460040f9", "1: ldr x6, [x2]"),
        ("a60100b4", "cbz x6, 4f"),
        ("c70040f9", "ldr x7, [x6]"),
        ("ff0004eb", "cmp x7, x4"),
        ("e1000054", "b.ne 2f"),
        ("c70440f9", "ldr x7, [x6, #8]"),
        ("ff0005eb", "cmp x7, x5"),
        ("81000054", "b.ne 2f"),
        ("c7404039", "ldrb w7, [x6, #16]"),
        ("fff40071", "cmp w7, #61"),
        ("60000054", "b.eq 3f"),
        ("42200091", "2: add x2, x2, #8"),
        ("f4ffff17", "b 1b"),
        ("5f0400f9", "3: str xzr, [x2, #8]"),
        ("200040f9", "4: ldr x0, [x1]"),
        ("a81b80d2", "mov x8, #221"),  # execve
        ("010000d4", "svc #0"),
        ("800c80d2", "mov x0, #100"),
        ("a80b80d2", "mov x8, #93"),  # exit
        ("010000d4", "svc #0"),
        ("5347455f4a4f4245", '5: .ascii "SGE_JOBE"'),
        ("5849545f53544154", '6: .ascii "XIT_STAT"'),
    ),
}
# For a machine without code here. doctor says that GLIBC_TUNABLES can put a queue in error there.
SCRIPT: Final = b"""#!/bin/sh -p
exec /usr/bin/env -i ${SGE_JOBEXIT_STAT:+"SGE_JOBEXIT_STAT=$SGE_JOBEXIT_STAT"} "$@"
"""


def build_clean_program(machine: str = "") -> bytes:
    """Return the program for a machine as `uname -m` names it: an ELF file, else a script."""
    machine = machine or os.uname().machine
    if machine not in CODE:
        return SCRIPT
    code = bytes.fromhex("".join(instruction for instruction, _ in CODE[machine]))
    header = struct.calcsize("<16sHHIQQQIHHHHHH")
    start = header + _PROGRAM_HEADERS * struct.calcsize("<IIQQQQQQ")
    size = start + len(code)
    return b"".join(
        (
            struct.pack(
                "<16sHHIQQQIHHHHHH",
                b"\x7fELF\x02\x01\x01",  # 64 bits, little endian
                2,  # ET_EXEC
                _EM[machine],
                1,
                _BASE + start,
                header,
                0,
                0,
                header,
                struct.calcsize("<IIQQQQQQ"),
                _PROGRAM_HEADERS,
                0,
                0,
                0,
            ),
            struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, _ALIGN),  # PT_LOAD, R+X
            struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16),  # PT_GNU_STACK, R+W
            code,
        )
    )
