# SPDX-License-Identifier: Apache-2.0
"""`prolog/clean`: start a program without the job's environment, whatever that holds.

Grid Engine starts a hook as root in the job's environment. The loader and the C library of any
ordinary program read that first: `GLIBC_TUNABLES` alone ends `/usr/bin/env`, and the queue with it.
So the first program has neither. It keeps five names, which a hook of the site's may read and no
program obeys, and becomes its first argument. It ends with 100 (job in error) where it cannot.

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
# What the shepherd itself says to a hook. Of each name the last line counts. So no more is left
# than five values of 128 KiB, for which a launcher has room under any limit that Grid Engine sets.
_KEPT: Final = tuple(
    f"SGE_{name}"
    for name in ("JOBEXIT_STAT", "CWD_PATH", "STDIN_PATH", "STDOUT_PATH", "STDERR_PATH")
)
_TABLE: Final = "".join(f"{name}=" for name in _KEPT)
_DATA: Final = (_TABLE.encode().hex(), f'9: .ascii "{_TABLE}"')
# argc, argv, then envp stand on the stack. The code goes through envp from its end (3), compares
# each with the names (4 to 7), and collects the first that it meets of each name below the end.
CODE: Final = {
    "x86_64": (
        ("488b0c24", "mov rcx, [rsp]"),
        ("488d742410", "lea rsi, [rsp+16]"),
        ("4c8d04ce", "lea r8, [rsi+rcx*8]"),
        ("4c89c2", "mov rdx, r8"),
        ("488b02", "1: mov rax, [rdx]"),
        ("4885c0", "test rax, rax"),
        ("7406", "jz 2f"),
        ("4883c208", "add rdx, 8"),
        ("ebf2", "jmp 1b"),
        ("4989d1", "2: mov r9, rdx"),
        ("31db", "xor ebx, ebx"),
        ("4d39c1", "3: cmp r9, r8"),
        ("7446", "je 8f"),
        ("4983e908", "sub r9, 8"),
        ("488d3d51000000", "lea rdi, [rip+9f]"),
        ("31c9", "xor ecx, ecx"),
        ("4d8b11", "4: mov r10, [r9]"),
        ("8a07", "5: mov al, [rdi]"),
        ("48ffc7", "inc rdi"),
        ("413a02", "cmp al, [r10]"),
        ("7518", "jne 6f"),
        ("49ffc2", "inc r10"),
        ("3c3d", "cmp al, 61"),
        ("75ef", "jne 5b"),
        ("0fabcb", "bts ebx, ecx"),
        ("72d5", "jc 3b"),
        ("4883ea08", "sub rdx, 8"),
        ("4d8b11", "mov r10, [r9]"),
        ("4c8912", "mov [rdx], r10"),
        ("ebc9", "jmp 3b"),
        ("3c3d", "6: cmp al, 61"),
        ("7407", "je 7f"),
        ("8a07", "mov al, [rdi]"),
        ("48ffc7", "inc rdi"),
        ("ebf5", "jmp 6b"),
        ("ffc1", "7: inc ecx"),
        ("83f905", "cmp ecx, 5"),
        ("75c9", "jne 4b"),
        ("ebb5", "jmp 3b"),
        ("488b3e", "8: mov rdi, [rsi]"),
        ("b83b000000", "mov eax, 59"),  # execve
        ("0f05", "syscall"),
        ("bf64000000", "mov edi, 100"),
        ("b83c000000", "mov eax, 60"),  # exit
        ("0f05", "syscall"),
        _DATA,
    ),
    "aarch64": (
        ("e30340f9", "ldr x3, [sp]"),
        ("e1430091", "add x1, sp, #16"),
        ("240c038b", "add x4, x1, x3, lsl #3"),
        ("e20304aa", "mov x2, x4"),
        ("458440f8", "1: ldr x5, [x2], #8"),
        ("e5ffffb5", "cbnz x5, 1b"),
        ("422000d1", "sub x2, x2, #8"),
        ("e50302aa", "mov x5, x2"),
        ("06008052", "mov w6, #0"),
        ("bf0004eb", "3: cmp x5, x4"),
        ("e0020054", "b.eq 8f"),
        ("a78c5ff8", "ldr x7, [x5, #-8]!"),
        ("69030010", "adr x9, 9f"),
        ("2a008052", "mov w10, #1"),
        ("eb0307aa", "4: mov x11, x7"),
        ("2c154038", "5: ldrb w12, [x9], #1"),
        ("6d154038", "ldrb w13, [x11], #1"),
        ("9f010d6b", "cmp w12, w13"),
        ("01010054", "b.ne 6f"),
        ("9ff50071", "cmp w12, #61"),
        ("61ffff54", "b.ne 5b"),
        ("df000a6a", "tst w6, w10"),
        ("61feff54", "b.ne 3b"),
        ("c6000a2a", "orr w6, w6, w10"),
        ("478c1ff8", "str x7, [x2, #-8]!"),
        ("f0ffff17", "b 3b"),
        ("9ff50071", "6: cmp w12, #61"),
        ("60000054", "b.eq 7f"),
        ("2c154038", "ldrb w12, [x9], #1"),
        ("fdffff17", "b 6b"),
        ("4a791f53", "7: lsl w10, w10, #1"),
        ("eafd2f36", "tbz w10, #5, 4b"),
        ("e9ffff17", "b 3b"),
        ("200040f9", "8: ldr x0, [x1]"),
        ("a81b80d2", "mov x8, #221"),  # execve
        ("010000d4", "svc #0"),
        ("800c80d2", "mov x0, #100"),
        ("a80b80d2", "mov x8, #93"),  # exit
        ("010000d4", "svc #0"),
        _DATA,
    ),
}
# For a machine without code here: docs/grid-engine.md says what that leaves open.
SCRIPT: Final = "\n".join(
    (
        "#!/bin/sh -p",
        *(f'[ -z "${{{name}+x}}" ] || set -- "{name}=${name}" "$@"' for name in _KEPT),
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
