# SPDX-License-Identifier: Apache-2.0
"""The device program of a cgroup of version 2: assembled by hand, attached by bpf(2).

Hot. Attached with BPF_F_ALLOW_MULTI: a device opens only where the programs of the cgroup and of
all above it agree, so ours can only take away and no other's gives back. It lives as long as its
cgroup (never a bpf_link, which ends with its process and leaves everything open).
"""

import ctypes
import errno
import os
from _struct import pack, unpack_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.isolation.policy import Rules


LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361}  # bpf(2)
# enum bpf_cmd, bpf_prog_type and bpf_attach_type of linux/bpf.h
LOAD, ATTACH, DETACH, FD_BY_ID, INFO, QUERY = 5, 8, 9, 13, 15, 16
CGROUP_DEVICE_PROGRAM, CGROUP_DEVICE = 15, 6
ALLOW_MULTI, REPLACE = 2, 4
PROGRAM_NAME = b"gpulock_dev"
MOST_PROGRAMS = 64  # programs that the kernel attaches to one cgroup (BPF_CGROUP_MAX_PROGS)
REPLACE_TURNS = 20  # hooks that replace one program at the same time: each turn one succeeds
ATTR_BYTES = 128  # of union bpf_attr: the tail must be zero
INFO_BYTES, NAME_AT = 256, 64  # of struct bpf_prog_info
MEMLOCK, UNLIMITED = 8, (1 << 64) - 1  # setrlimit(2); before Linux 5.11 programs count

# opcodes of linux/bpf_common.h and linux/bpf.h
LOAD_WORD, AND, JUMP_UNLESS, MOVE, MOVE_LOW, CALL, EXIT = 0x61, 0x57, 0x55, 0xB7, 0xBC, 0x85, 0x95
BYTES = 8  # of an instruction
CHARACTER, TYPE_BITS = 2, 0xFFFF  # struct bpf_cgroup_dev_ctx: access << 16 | type, major, minor
GET_UID = 15  # the caller's uid as the first user namespace sees it: no namespace makes it root's


def encode_bpf_instruction(
    code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0
) -> bytes:
    """Return one instruction (struct bpf_insn)."""
    return pack("<BBhi", code, dst | src << 4, off, imm)


def assemble_device_program(rules: "Rules", spare_root: bool = False) -> bytes:
    """Return the program that closes the rules' majors but for their open minors.

    With `spare_root` only to processes whose real user is not root.
    """
    instruction = encode_bpf_instruction
    allow = instruction(MOVE, 0, imm=1) + instruction(EXIT)
    deny = instruction(MOVE, 0, imm=0) + instruction(EXIT)
    if spare_root:
        root = instruction(CALL, imm=GET_UID) + instruction(MOVE_LOW, 0, 0)
        deny = root + instruction(JUMP_UNLESS, 0, off=2) + allow + deny
    body = b""
    for major, minors in rules.items():
        opened = [instruction(JUMP_UNLESS, 4, off=2, imm=one) + allow for one in sorted(minors)]
        closed = b"".join(opened) + deny
        body += instruction(JUMP_UNLESS, 3, off=len(closed) // BYTES, imm=major) + closed
    return (
        instruction(LOAD_WORD, 2, 1, 0)
        + instruction(AND, 2, imm=TYPE_BITS)
        + instruction(LOAD_WORD, 3, 1, 4)
        + instruction(LOAD_WORD, 4, 1, 8)
        + instruction(JUMP_UNLESS, 2, off=len(body) // BYTES, imm=CHARACTER)
        + body
        + allow
    )


def bpf_syscall(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Call bpf(2); return its result and the attributes as the kernel left them; raise OSError."""
    number = SYSCALL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "bpf(2) has no known number on this machine")
    attr = ctypes.create_string_buffer(attributes, ATTR_BYTES)
    words = [number, command, ctypes.addressof(attr), ATTR_BYTES]
    result = int(LIBC.syscall(*map(ctypes.c_long, words)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf({command}): {os.strerror(code)}")
    return result, attr.raw


def load_device_program(code: bytes) -> int:
    """Load the program of a cgroup; return its file descriptor; raise OSError.

    Where programs count against RLIMIT_MEMLOCK, the job's own limit is lifted and it is tried once
    more.
    """
    text, licence = [ctypes.create_string_buffer(data) for data in (code, b"GPL")]
    places = ctypes.addressof(text), ctypes.addressof(licence)
    head = pack("<IIQQ", CGROUP_DEVICE_PROGRAM, len(code) // BYTES, *places)
    attributes = head + pack("<IIQII16s", 0, 0, 0, 0, 0, PROGRAM_NAME)
    try:
        return bpf_syscall(LOAD, attributes)[0]
    except PermissionError:
        LIBC.setrlimit(MEMLOCK, (ctypes.c_uint64 * 2)(UNLIMITED, UNLIMITED))
        return bpf_syscall(LOAD, attributes)[0]


def attach_device_program(folder: str, code: bytes) -> None:
    """Attach a program to a cgroup, in one step in place of ours there; raise OSError."""
    new = load_device_program(code)
    group = -1
    try:
        group = os.open(folder, os.O_RDONLY)
        for turn in range(REPLACE_TURNS):
            try:
                replace_device_program(group, new)
            except FileNotFoundError:  # another hook has replaced it between two of our calls
                if turn == REPLACE_TURNS - 1:
                    raise
            else:
                return
    finally:
        close_descriptors(new, group)


def replace_device_program(group: int, new: int) -> None:
    """Attach a program in place of ours, or beside others' where there is none; raise OSError.

    FileNotFoundError: what was there by then is there no more.
    """
    old = -1
    try:
        mine = attached_program_ids(group)
        if mine:
            old = bpf_syscall(FD_BY_ID, pack("<I", mine[0]))[0]
        flags = ALLOW_MULTI | REPLACE if mine else ALLOW_MULTI
        bpf_syscall(ATTACH, pack("<IIIII", group, new, CGROUP_DEVICE, flags, max(old, 0)))
    finally:
        close_descriptors(old)


def detach_device_programs(folder: str) -> None:
    """Take our programs away from a cgroup; raise OSError."""
    group = os.open(folder, os.O_RDONLY)
    try:
        for number in attached_program_ids(group):
            program = bpf_syscall(FD_BY_ID, pack("<I", number))[0]
            try:
                bpf_syscall(DETACH, pack("<III", group, program, CGROUP_DEVICE))
            finally:
                os.close(program)
    finally:
        os.close(group)


def has_device_program(folder: str) -> bool:
    """Return whether a program of ours is attached to a cgroup; raise OSError."""
    group = os.open(folder, os.O_RDONLY)
    try:
        return bool(attached_program_ids(group))
    finally:
        os.close(group)


def attached_program_ids(group: int) -> list[int]:
    """Return the ids of our programs attached to the cgroup open as `group`; raise OSError."""
    numbers = (ctypes.c_uint32 * MOST_PROGRAMS)()
    place = ctypes.addressof(numbers)
    _, answer = bpf_syscall(
        QUERY, pack("<IIIIQI", group, CGROUP_DEVICE, 0, 0, place, MOST_PROGRAMS)
    )
    count = int(unpack_from("<I", answer, 24)[0])
    return [number for number in numbers[:count] if bpf_program_name(number) == PROGRAM_NAME]


def bpf_program_name(number: int) -> bytes:
    """Return a program's name by its id, nothing for one that is gone; raise OSError."""
    try:
        program = bpf_syscall(FD_BY_ID, pack("<I", number))[0]
    except FileNotFoundError:
        return b""
    try:
        info = ctypes.create_string_buffer(INFO_BYTES)
        bpf_syscall(INFO, pack("<IIQ", program, INFO_BYTES, ctypes.addressof(info)))
    finally:
        os.close(program)
    return info.raw[NAME_AT:].partition(b"\0")[0]


def close_descriptors(*descriptors: int) -> None:
    """Close what was opened."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
