# SPDX-License-Identifier: Apache-2.0
"""What a job may open follows from its grant alone; the device program opens that, and for whom."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN
from gpulock.isolation import bpf, policy
from gpulock.node.devices import Device
from tests.support.faults import raising, refusal

CHARACTER, BLOCK = 2, 1
READ_WRITE = 6
CAPS = 508  # a major the kernel hands out at run time
RULES = {195: frozenset({0, 3, 254, 255}), CAPS: frozenset({4, 5})}
WORD = 0xFFFFFFFF


def run(code: bytes, kind: int, major: int, minor: int, uid: int = 1000) -> int:
    """Run a program on one open(2); return r0, which allows unless it is 0."""
    context = struct.pack("<III", READ_WRITE << 16 | kind, major, minor)
    steps = [struct.unpack_from("<BBhi", code, at) for at in range(0, len(code), 8)]
    registers, at = [0] * 10, 0
    while True:
        opcode, both, off, imm = steps[at]
        dst, src = both & 15, both >> 4
        at += 1
        if opcode == 0x61:  # load a word of the context
            registers[dst] = struct.unpack_from("<I", context, off)[0]
        elif opcode == 0x57:
            registers[dst] &= imm
        elif opcode == 0xB7:
            registers[dst] = imm
        elif opcode == 0xBC:  # of 32 bits: the upper half becomes 0
            registers[dst] = registers[src] & WORD
        elif opcode == 0x55:
            at += off if registers[dst] != imm else 0
        elif (opcode, imm) == (0x85, 15):  # bpf_get_current_uid_gid: gid << 32 | uid
            registers = [(100 << 32) | uid, *[0xDEAD] * 5, *registers[6:]]
        elif opcode == 0x95:
            return registers[0]
        else:
            raise AssertionError(f"opcode {opcode:#x}")


def test_the_rules_open_their_own_close_the_rest_of_a_major_and_leave_all_others() -> None:
    code = bpf.assemble_device_program(RULES)
    assert [run(code, CHARACTER, *place) for place in OPEN] == [1] * len(OPEN)
    assert [run(code, CHARACTER, *place) for place in CLOSED] == [0] * len(CLOSED)
    assert [run(code, *place) for place in OF_OTHERS] == [1] * len(OF_OTHERS)
    assert run(code, CHARACTER, 195, 1, uid=0) == 0, "nor is root spared"


OPEN = [(195, 0), (195, 3), (195, 254), (195, 255), (CAPS, 4), (CAPS, 5)]
CLOSED = [(195, 1), (195, 2), (195, 4), (195, 253), (CAPS, 0), (CAPS, 3), (CAPS, 6)]
OF_OTHERS = [(CHARACTER, 1, 3), (CHARACTER, 509, 0), (BLOCK, 195, 1)]


def test_a_major_of_which_nothing_is_open_is_closed() -> None:
    code = bpf.assemble_device_program({CAPS: frozenset(), 195: frozenset({255})})

    assert [run(code, CHARACTER, *n) for n in ((CAPS, 0), (195, 0), (195, 255))] == [0, 0, 1]


@pytest.mark.parametrize(("uid", "allowed"), [(0, 1), (1, 0), (1000, 0)])
def test_a_program_that_spares_root_closes_to_everybody_else(uid: int, allowed: int) -> None:
    code = bpf.assemble_device_program(RULES, spare_root=True)

    assert run(code, CHARACTER, 195, 1, uid) == allowed
    assert run(code, CHARACTER, 195, 3, uid) == 1


def test_a_machine_whose_bpf_has_no_known_number_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bpf, "SYSCALL", dict[str, int]())

    with pytest.raises(OSError, match="no known number"):
        bpf.bpf_syscall(bpf.QUERY, b"")


class Kernel:
    """Stands for bpf(2): programs with their names, and which of them one cgroup has."""

    def __init__(self, names: dict[int, bytes]) -> None:
        self.names = names
        self.attached = [*names]
        self.descriptors: dict[int, int] = {}  # of cgroups and programs, with the program's id

    def syscall(self, _: object, command: ctypes.c_long, attr: ctypes.c_long, __: object) -> int:
        """Do a command; return its result."""
        place = attr.value
        first, second, _, flags, old = struct.unpack("<5I", ctypes.string_at(place, 20))
        (pointer,) = struct.unpack("<Q", ctypes.string_at(place + 16, 8))
        if command.value == bpf.LOAD:
            assert second == len(bpf.assemble_device_program(RULES)) // 8
            assert ctypes.string_at(place + 24, 24) == bytes(24)  # no log, no flags
            self.names[99] = ctypes.string_at(place + 48, 16).rstrip(b"\0")
            return self.open(99)
        if command.value == bpf.FD_BY_ID:
            if self.names[first]:
                return self.open(first)
            ctypes.set_errno(errno.ENOENT)
            return -1
        if command.value == bpf.INFO:
            name = self.names[self.descriptors[first]]
            (pointer,) = struct.unpack("<Q", ctypes.string_at(place + 8, 8))
            ctypes.memmove(pointer + 64, name, len(name))
            return 0
        assert os.path.isdir(f"/proc/self/fd/{first}")
        self.descriptors[first] = 0
        if command.value == bpf.QUERY:
            ids = struct.pack(f"<{len(self.attached)}I", *self.attached)
            ctypes.memmove(pointer, ids, len(ids))
            ctypes.memmove(place + 24, struct.pack("<I", len(self.attached)), 4)
        elif command.value == bpf.DETACH:
            self.attached.remove(self.descriptors[second])
        elif flags == bpf.ALLOW_MULTI | bpf.REPLACE:
            before = self.attached.index(self.descriptors[old])
            self.attached[before] = self.descriptors[second]
        else:
            assert (command.value, flags) == (bpf.ATTACH, bpf.ALLOW_MULTI)
            self.attached.append(self.descriptors[second])
        return 0

    def open(self, program: int) -> int:
        """Return a new descriptor of a program."""
        descriptor = os.open("/dev/null", os.O_RDONLY)
        self.descriptors[descriptor] = program
        return descriptor


@pytest.mark.parametrize("before", [[1, 2, 3, 4], [1, 2, 4]])
def test_a_program_takes_the_place_of_ours_and_touches_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int]
) -> None:
    names = {
        1: b"systemd",
        2: b"",
        3: bpf.PROGRAM_NAME,
        4: b"gpulock_dev2",
    }  # the second is just gone
    kernel = Kernel({number: names[number] for number in before})
    monkeypatch.setattr(bpf, "LIBC", kernel)

    bpf.attach_device_program(str(tmp_path), bpf.assemble_device_program(RULES))
    after = [1, 2, 99, 4] if 3 in before else [1, 2, 4, 99]
    assert (kernel.attached, bpf.has_device_program(str(tmp_path))) == (after, True)

    bpf.detach_device_programs(str(tmp_path))
    assert (kernel.attached, bpf.has_device_program(str(tmp_path))) == ([1, 2, 4], False)
    for descriptor in kernel.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_program_that_another_hook_replaces_meanwhile_is_replaced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = [7]

    def attach(group: int, new: int) -> None:
        """Stand for the kernel, which knows the program that was listed no more."""
        assert group >= 0
        if attached == [7]:
            attached[:] = [8]
            raise FileNotFoundError(errno.ENOENT, "no such program")
        attached[:] = [new]

    def load(code: bytes) -> int:
        assert code == b""
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(bpf, "load_device_program", load)
    monkeypatch.setattr(bpf, "replace_device_program", attach)

    bpf.attach_device_program(str(tmp_path), b"")

    assert attached not in ([7], [8])
    monkeypatch.setattr(bpf, "replace_device_program", raising(FileNotFoundError()))
    with pytest.raises(FileNotFoundError):  # or its job would open every card
        bpf.attach_device_program(str(tmp_path), b"")


def test_where_programs_count_as_locked_memory_that_limit_is_lifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 5.11, as on RHEL 8: EPERM says nothing else."""
    lifted: list[int] = []

    class Libc:
        def setrlimit(self, which: int, _: object) -> None:
            lifted.append(which)

    def load(*_: object) -> tuple[int, bytes]:
        if not lifted:
            raise PermissionError
        return 9, b""

    monkeypatch.setattr(bpf, "LIBC", Libc())
    monkeypatch.setattr(bpf, "bpf_syscall", load)
    assert (bpf.load_device_program(b""), lifted) == (9, [resource.RLIMIT_MEMLOCK])


# --- the rules: what a job may open follows from its grant alone ----------------------------------

CONTROL = {254, 255}
DEVICES = """Character devices:
  1 mem
195 nvidia-frontend
508 nvidia-caps
509 nvidia-caps-imex-channels

Block devices:
508 nvidia-caps
"""
MINORS = """config 1
monitor 2
gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu2/gi7/access 66
gpu2/gi7/ci0/access 67
gpu2/gi7/ci1/access 68
"""


def gpu(minor: int) -> Device:
    device = Device(f"0000:{minor + 1:02x}:00.0", minor)
    device.minor = minor
    return device


def instance(minor: int, name: str) -> Device:
    device = Device(f"{gpu(minor).id}.{name}", minor)
    device.minor = minor
    return device


@pytest.fixture
def driver(tmp_path: Path) -> str:
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia-caps/mig-minors").write_text(MINORS)
    return str(tmp_path / "nvidia")


def test_an_instance_opens_its_card_and_its_own_two_access_nodes(driver: str) -> None:
    rules = policy.device_rules([instance(2, "gi7.ci1")], CAPS, driver)

    assert rules == {195: {2, *CONTROL}, CAPS: {66, 68}}


@pytest.mark.parametrize(
    ("device", "major", "kind"),
    [
        *[(gpu(minor), None, UNKNOWN) for minor in (-1, 254, 255, 300)],  # no card has that minor
        (instance(2, "gi9.ci0"), CAPS, UNKNOWN),  # the driver does not tell its nodes
        (instance(0, "gi1.ci0"), None, BROKEN),  # it has no access nodes at all
    ],
)
def test_a_device_whose_numbers_are_not_known_refuses_the_job(
    driver: str, device: Device, major: int | None, kind: str
) -> None:
    assert refusal(lambda: policy.device_rules([device], major, driver)).kind == kind


def test_the_major_is_that_of_the_very_name_among_character_devices() -> None:
    assert policy.parse_device_major("nvidia-caps", DEVICES) == CAPS
    assert policy.parse_device_major("nvidia-caps-imex-channels", DEVICES) == CAPS + 1
    assert policy.parse_device_major("nvidia", DEVICES) is None
    of_blocks = DEVICES.replace("508 nvidia-caps\n5", "5")
    assert policy.parse_device_major("nvidia-caps", of_blocks) is None


def test_a_proc_without_devices_refuses_the_job(tmp_path: Path) -> None:
    assert refusal(lambda: policy.read_caps_major(str(tmp_path))).kind == UNKNOWN
