# SPDX-License-Identifier: Apache-2.0
"""The device program of a cgroup of version 2: assembled by hand, attached by bpf(2).

Hot. Attached with BPF_F_ALLOW_MULTI: a device opens only where the programs of the cgroup and of
all above it agree, so ours can only take away and no other's gives back. It lives as long as its
cgroup (never a bpf_link, which ends with its process and leaves everything open). `_ctypes`
is the C half of ctypes: 0.5 ms instead of 4.
"""

import _ctypes
import errno
import os
from _struct import pack, unpack_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import c_char as Char
    from ctypes import c_long as Long

    from gpulock.isolation.policy import Rules
else:

    class Char(_ctypes._SimpleCData):
        _type_ = "c"

    class Long(_ctypes._SimpleCData):
        _type_ = "l"


LIBC = "libc.so.6"  # is loaded: every Python that CUDA runs on is glibc's
SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361}  # bpf(2)
# enum bpf_cmd, bpf_prog_type and bpf_attach_type of linux/bpf.h
LOAD, ATTACH, DETACH, FD_BY_ID, INFO, QUERY = 5, 8, 9, 13, 15, 16
CGROUP_DEVICE_PROGRAM, CGROUP_DEVICE = 15, 6
ALLOW_MULTI, REPLACE = 2, 4
NAME = b"gpulock_dev"
MOST = 64  # programs that the kernel attaches to one cgroup (BPF_CGROUP_MAX_PROGS)
REPLACE_TURNS = 20  # hooks that replace one program at the same time: each turn one succeeds
ATTR_BYTES = 128  # of union bpf_attr: the tail must be zero
INFO_BYTES, NAME_AT = 256, 64  # of struct bpf_prog_info
MEMLOCK, UNLIMITED = 8, (1 << 64) - 1  # setrlimit(2); before Linux 5.11 programs count

# opcodes of linux/bpf_common.h and linux/bpf.h
LOAD_WORD, AND, JUMP, JUMP_IF, JUMP_UNLESS = 0x61, 0x57, 0x05, 0x15, 0x55
MOVE, MOVE_LOW, CALL, EXIT = 0xB7, 0xBC, 0x85, 0x95
CHARACTER, TYPE_BITS = 2, 0xFFFF  # struct bpf_cgroup_dev_ctx: access << 16 | type, major, minor
GET_UID = 15  # the caller's uid as the first user namespace sees it: no namespace makes it root's
ALLOW, DENY = "allow", "deny"


def encode_bpf_instruction(
    code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0
) -> bytes:
    """Return one instruction (struct bpf_insn)."""
    return pack("<BBhi", code, dst | src << 4, off, imm)


def assemble_device_program(rules: "Rules", spare_root: bool = False) -> bytes:
    """Return the program that closes the rules' majors but for their open minors.

    With `spare_root` only to processes whose real user is not root.
    """
    body: list[tuple[int, int, object, int]] = []  # opcode, register, distance or label, number
    for major, minors in rules.items():
        body.append((JUMP_UNLESS, 3, len(minors) + 1, major))
        body += [(JUMP_IF, 4, ALLOW, minor) for minor in sorted(minors)]
        body.append((JUMP, 0, DENY, 0))
    verdict = encode_bpf_instruction(MOVE, 0, imm=0) + encode_bpf_instruction(EXIT)
    if spare_root:
        root = encode_bpf_instruction(CALL, imm=GET_UID) + encode_bpf_instruction(MOVE_LOW, 0, 0)
        verdict = (
            root + encode_bpf_instruction(JUMP_UNLESS, 0, off=2) + _allow_instructions() + verdict
        )
    labels = {ALLOW: len(body), DENY: len(body) + 2}
    head = (
        encode_bpf_instruction(LOAD_WORD, 2, 1, 0)
        + encode_bpf_instruction(AND, 2, imm=TYPE_BITS)
        + encode_bpf_instruction(LOAD_WORD, 3, 1, 4)
        + encode_bpf_instruction(LOAD_WORD, 4, 1, 8)
        + encode_bpf_instruction(JUMP_UNLESS, 2, off=len(body), imm=CHARACTER)
    )
    for place, (code, register, to, number) in enumerate(body):
        off = labels[to] - place - 1 if isinstance(to, str) else int(str(to))
        head += encode_bpf_instruction(code, register, off=off, imm=number)
    return head + _allow_instructions() + verdict


def _allow_instructions() -> bytes:
    return encode_bpf_instruction(MOVE, 0, imm=1) + encode_bpf_instruction(EXIT)


class _LibcFunction(_ctypes.CFuncPtr):
    """A C function that sets errno and returns a long."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = Long


class KernelBuffer:
    """Bytes that the kernel reads or writes, at an address that stays."""

    __slots__ = ("_at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self._at = (Char * len(data)).from_buffer(self.data)

    @property
    def address(self) -> int:
        """Return where the bytes are."""
        return _ctypes.addressof(self._at)


def libc_function(name: str) -> _LibcFunction:
    """Return a function of the C library the interpreter runs in."""
    return _LibcFunction(_ctypes.dlsym(_ctypes.dlopen(LIBC, os.RTLD_NOW), name))


def bpf_syscall(command: int, attributes: bytes) -> tuple[int, bytearray]:
    """Call bpf(2); return its result and the attributes as the kernel left them; raise OSError."""
    number = SYSCALL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "bpf(2) has no known number on this machine")
    attr = KernelBuffer(attributes.ljust(ATTR_BYTES, b"\0"))
    result = int(
        libc_function("syscall")(Long(number), Long(command), Long(attr.address), Long(ATTR_BYTES))
    )
    if result < 0:
        code = _ctypes.get_errno()
        raise OSError(code, f"bpf({command}): {os.strerror(code)}")
    return result, attr.data


def load_device_program(code: bytes) -> int:
    """Load the program of a cgroup; return its file descriptor; raise OSError.

    Where programs count against RLIMIT_MEMLOCK, the job's own limit is lifted and it is tried once
    more.
    """
    text, licence = KernelBuffer(code), KernelBuffer(b"GPL\0")
    head = pack("<IIQQ", CGROUP_DEVICE_PROGRAM, len(code) // 8, text.address, licence.address)
    attributes = head + pack("<IIQII16s", 0, 0, 0, 0, 0, NAME)
    try:
        return bpf_syscall(LOAD, attributes)[0]
    except PermissionError:
        unlimited = KernelBuffer(pack("<QQ", UNLIMITED, UNLIMITED))
        libc_function("setrlimit")(Long(MEMLOCK), Long(unlimited.address))
        return bpf_syscall(LOAD, attributes)[0]


def attach_device_program(folder: str, code: bytes) -> None:
    """Attach a program to a cgroup, in one step in place of ours there; raise OSError."""
    new = load_device_program(code)
    group = -1
    try:
        group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bool(attached_program_ids(group))
    finally:
        os.close(group)


def attached_program_ids(group: int) -> list[int]:
    """Return the ids of our programs attached to the cgroup open as `group`; raise OSError."""
    found = KernelBuffer(bytes(4 * MOST))
    _, answer = bpf_syscall(QUERY, pack("<IIIIQI", group, CGROUP_DEVICE, 0, 0, found.address, MOST))
    count = int(unpack_from("<I", answer, 24)[0])
    return [n for n in unpack_from(f"<{count}I", found.data) if bpf_program_name(n) == NAME]


def bpf_program_name(number: int) -> bytes:
    """Return a program's name by its id, nothing for one that is gone; raise OSError."""
    try:
        program = bpf_syscall(FD_BY_ID, pack("<I", number))[0]
    except FileNotFoundError:
        return b""
    try:
        info = KernelBuffer(bytes(INFO_BYTES))
        bpf_syscall(INFO, pack("<IIQ", program, INFO_BYTES, info.address))
    finally:
        os.close(program)
    return bytes(info.data[NAME_AT : NAME_AT + 16]).rstrip(b"\0")


def close_descriptors(*descriptors: int) -> None:
    """Close what was opened."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
