# SPDX-License-Identifier: Apache-2.0
"""`prolog/clean`: start a program without the job's environment, whatever that holds.

Grid Engine starts a hook as root in the job's environment. The loader and the C library of any
ordinary program read that first: `GLIBC_TUNABLES` alone ends `/usr/bin/env`, and the queue with it.
So the first program has neither. It keeps `SGE_*`, which a hook of the site's may read and nothing
obeys, and becomes its first argument. It ends with 100 (job in error) where it cannot.

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
# argc, argv, then envp stand on the stack; 0x5f454753 is `SGE_`.
CODE: Final = {
    "x86_64": (
        ("488b0c24", "mov rcx, [rsp]"),
        ("488d742410", "lea rsi, [rsp+16]"),
        ("488d14ce", "lea rdx, [rsi+rcx*8]"),
        ("4989d0", "mov r8, rdx"),
        ("4989d1", "mov r9, rdx"),
        ("498b38", "1: mov rdi, [r8]"),
        ("4983c008", "add r8, 8"),
        ("4885ff", "test rdi, rdi"),
        ("7411", "jz 2f"),
        ("813f5347455f", "cmp dword ptr [rdi], 0x5f454753"),
        ("75ec", "jne 1b"),
        ("498939", "mov [r9], rdi"),
        ("4983c108", "add r9, 8"),
        ("ebe3", "jmp 1b"),
        ("498939", "2: mov [r9], rdi"),
        ("488b3e", "mov rdi, [rsi]"),
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
        ("e40302aa", "mov x4, x2"),
        ("e50302aa", "mov x5, x2"),
        ("e6010018", "ldr w6, 3f"),
        ("878440f8", "1: ldr x7, [x4], #8"),
        ("c70000b4", "cbz x7, 2f"),
        ("e80040b9", "ldr w8, [x7]"),
        ("1f01066b", "cmp w8, w6"),
        ("81ffff54", "b.ne 1b"),
        ("a78400f8", "str x7, [x5], #8"),
        ("faffff17", "b 1b"),
        ("bf0000f9", "2: str xzr, [x5]"),
        ("200040f9", "ldr x0, [x1]"),
        ("a81b80d2", "mov x8, #221"),  # execve
        ("010000d4", "svc #0"),
        ("800c80d2", "mov x0, #100"),
        ("a80b80d2", "mov x8, #93"),  # exit
        ("010000d4", "svc #0"),
        ("5347455f", '3: .ascii "SGE_"'),
    ),
}
# For a machine without code here: docs/grid-engine.md says what that leaves open.
_KEPT: Final = ("JOBEXIT_STAT", "CWD_PATH", "STDIN_PATH", "STDOUT_PATH", "STDERR_PATH")
SCRIPT: Final = "\n".join(
    (
        "#!/bin/sh -p",
        *(f'[ -z "${{SGE_{name}+x}}" ] || set -- "SGE_{name}=$SGE_{name}" "$@"' for name in _KEPT),
        'exec /usr/bin/env -i "$@"\n',
    )
).encode()


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
