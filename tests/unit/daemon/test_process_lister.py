# SPDX-License-Identifier: Apache-2.0
"""The program that lists processes, run by an interpreter of its instructions; where it goes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from gpulock.daemon.core import process_lister
from gpulock.daemon.core.kernel_types import FUNCTION, STRUCT, UNION, KernelTypes
from gpulock.daemon.core.process_lister import TaskOffsets
from gpulock.node.process_list import END, FORMAT, NAME
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from tests.support.faults import raising
from tests.support.process_list import write_process_list

INTEGER, POINTER, ARRAY, ENUM = 1, 2, 3, 6
KERNEL_THREAD, EXITING = 0x200000, 0x4
META, SEQ, TASK, CRED, STACK = 0x1000, 0x2000, 0x3000, 0x4000, 0x9000
EINVAL = OSError(22, "Invalid argument")


class Types:
    """A BTF file in the making."""

    def __init__(self) -> None:
        self.strings, self.types, self.number = b"\0", b"", 0

    def name(self, text: str) -> int:
        self.strings += text.encode() + b"\0"
        return len(self.strings) - len(text) - 1 if text else 0

    def add(self, kind: int, name: str, size: int = 0, many: int = 0, rest: bytes = b"") -> int:
        info = kind << 24 | many
        self.types += struct.pack("=III", self.name(name), info, size) + rest
        self.number += 1
        return self.number

    def structure(self, name: str, *members: tuple[str, int, int], flag: int = 0) -> int:
        rest = b"".join(struct.pack("=III", self.name(n), t, bits) for n, t, bits in members)
        kind = UNION if name == "union" else STRUCT
        number = self.add(kind | flag, "" if kind == UNION else name, 4096, len(members), rest)
        return number

    def data(self) -> bytes:
        sizes = (0, len(self.types), len(self.types), len(self.strings))
        return struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, *sizes) + self.types + self.strings


def kernel() -> Types:
    """Return what a kernel tells whose credentials stand in an anonymous union."""
    made = Types()
    number = made.add(INTEGER, "int", 4, rest=bytes(4))
    made.add(ARRAY, "", rest=bytes(12))
    made.add(ENUM, "pid", 4, 2, bytes(16))
    inner = made.structure("union", ("real_cred", number, 0), ("other", number, 0))
    fields = [("flags", number, 8 * 44), ("pid", number, 8 * 100), ("tgid", number, 8 * 104)]
    made.structure(
        "task_struct",
        *fields,
        ("bits", number, 3 << 24 | 8 * 120 + 5),
        ("", inner, 8 * 200),
        flag=0x80,
    )
    made.structure("cred", ("uid", number, 64), ("euid", number, 8 * 24))
    made.add(FUNCTION, "bpf_iter_task_file", number)
    made.add(FUNCTION, "bpf_iter_task", number)
    return made


def test_the_offsets_are_the_kernels_own() -> None:
    at = TaskOffsets(KernelTypes(kernel().data()))
    assert (at.flags, at.pid, at.tgid, at.cred, at.euid) == (44, 100, 104, 200, 24)
    assert at.iterator == 8


@pytest.mark.parametrize("missing", ["task_struct", "tgid", "euid", "bpf_iter_task"])
def test_a_kernel_that_does_not_tell_is_refused(missing: str) -> None:
    made = kernel()
    made.strings = made.strings.replace(f"\0{missing}\0".encode(), f"\0{missing[::-1]}\0".encode())
    with pytest.raises(ValueError, match=f"does not tell of .*{missing}"):
        TaskOffsets(KernelTypes(made.data()))


def test_a_member_within_a_byte_has_no_offset() -> None:
    with pytest.raises(ValueError, match=r"task_struct\.bits"):
        KernelTypes(kernel().data()).member_offset("task_struct", "bits")


@pytest.mark.parametrize("cut", [0, 1, 23, 30, 60])
def test_types_that_are_cut_short_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="BTF"):
        TaskOffsets(KernelTypes(kernel().data()[:cut]))


def test_a_type_of_an_unknown_kind_is_refused() -> None:
    made = kernel()
    made.add(31, "later")
    with pytest.raises(ValueError, match="unknown kind"):
        KernelTypes(made.data())


def run(tgid: int, pid: int, flags: int = 0, euid: int | None = 1000) -> list[tuple[int, int]]:
    """Run the program on one task, on none where its number is 0; return what it writes."""
    at = TaskOffsets(KernelTypes(kernel().data()))
    memory = {
        **{8: TASK if pid else 0, 0: META, META: SEQ, STACK - 8: 0, STACK - 4: 0},
        **{TASK + at.flags: flags, TASK + at.tgid: tgid, TASK + at.pid: pid},
        **{TASK + at.cred: 0 if euid is None else CRED, CRED + at.euid: euid or 0},
    }
    code = process_lister.assemble_process_lister(at)
    steps = [struct.unpack_from("<BBhi", code, n) for n in range(0, len(code), 8)]
    registers, place, written = [0] * 11, 0, list[tuple[int, int]]()
    registers[10] = STACK
    while True:
        opcode, both, off, number = steps[place]
        dst, src = both & 15, both >> 4
        place += 1
        if opcode in (0x61, 0x79):
            registers[dst] = memory[registers[src] + off]
        elif opcode == 0x63:
            memory[registers[dst] + off] = registers[src]
        elif opcode == 0x62:
            memory[registers[dst] + off] = number & 0xFFFFFFFF
        elif opcode == 0xBF:
            registers[dst] = registers[src]
        elif opcode == 0xB7:
            registers[dst] = number
        elif opcode == 0x07:
            registers[dst] += number
        elif (opcode, number) == (0x85, 127):
            assert registers[1:4] == [SEQ, STACK - 8, 8]
            written.append((memory[STACK - 8], memory[STACK - 4]))
            registers[:6] = [0xDEAD] * 6
        elif opcode == 0x95:
            assert registers[0] == 0
            return written
        elif opcode == 0x05 or jumps(opcode, registers[dst], registers[src], number):
            place += off


def jumps(opcode: int, left: int, right: int, number: int) -> bool:
    return {0x15: left == number, 0x1D: left == right, 0x45: bool(left & number)}[opcode]


def test_a_process_is_written_with_its_effective_user() -> None:
    assert run(7, 7, euid=4_000_000_000) == [(7, 4_000_000_000)]


def test_a_thread_is_passed_over() -> None:
    assert run(7, 8) == []


def test_a_dead_leader_whose_thread_takes_its_number_is_written() -> None:
    assert run(7, 8, EXITING) == [(7, 1000)]
    assert run(7, 7, EXITING) == [(7, 1000)]


def test_a_kernel_thread_is_passed_over() -> None:
    assert run(7, 7, KERNEL_THREAD) == run(7, 8, KERNEL_THREAD | EXITING) == []


def test_a_process_whose_user_is_not_told_is_roots_and_looked_at_closer() -> None:
    assert run(7, 7, euid=None) == [(7, 0)]


def test_the_end_is_written_last() -> None:
    assert run(0, 0) == [(END, FORMAT)]


def settings(**keys: str) -> Settings:
    return Settings(keys)


def test_a_list_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process_list(tmp_path, {1: 0})
    tmp_path.chmod(0o700)
    monkeypatch.setattr(process_lister, "pin_process_list", raising(EINVAL))
    assert process_lister.ensure_process_list(settings(), str(tmp_path)) == ""


@pytest.fixture
def first_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever process namespace the tests are in is the first of this machine."""
    monkeypatch.setattr(process_lister, "HOST_PIDS", Proc().pid_namespace(""))


def test_a_kernel_that_takes_no_program_is_no_fault(tmp_path: Path, first_namespace: None) -> None:
    btf = tmp_path / "vmlinux"
    for data in (b"", kernel().data()[:50]):
        btf.write_bytes(data)
        assert "BTF" in process_lister.ensure_process_list(settings(), str(tmp_path), str(btf))
    missing = str(tmp_path / "nothing")
    assert missing in process_lister.ensure_process_list(settings(), str(tmp_path), missing)


def test_a_node_that_is_simulated_has_no_list() -> None:
    for node in (settings(SIMULATION="/m"), settings(PROC_ROOT="/p")):
        assert process_lister.ensure_process_list(node, "/nowhere") != ""


def test_a_list_that_is_not_wanted_is_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / "pins"
    folder.mkdir()
    write_process_list(folder, {1: 0})
    why = process_lister.ensure_process_list(settings(PROCESS_LIST="proc"), str(folder))
    assert why == "PROCESS_LIST=proc"
    assert not folder.exists()
    process_lister.remove_process_list(str(folder))


def test_another_process_namespace_than_the_first_has_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_lister, "HOST_PIDS", "pid:[1]")
    monkeypatch.setattr(process_lister, "pin_process_list", raising(EINVAL))
    why = process_lister.ensure_process_list(settings(), str(tmp_path))
    assert why == "this is not the first pid namespace"


def test_a_list_that_leaves_a_process_out_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_namespace: None
) -> None:
    """A security module may keep a process from BPF programs."""
    folder = tmp_path / "pins"
    folder.mkdir(0o700)

    def pin(_: str, __: str) -> None:
        write_process_list(folder, {1: 0})

    monkeypatch.setattr(process_lister, "pin_process_list", pin)
    assert "is left out" in process_lister.ensure_process_list(settings(), str(folder))
    assert not folder.exists()


def test_a_list_that_says_another_user_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, tree = os.getpid(), {1: 0, os.getpid(): 1000, 7: 5}

    def listed(_: Proc) -> dict[int, int]:
        return tree.copy()

    monkeypatch.setattr(process_lister, "list_with_uids", listed)
    proc = Proc(pins=str(tmp_path))
    tmp_path.chmod(0o700)
    write_process_list(tmp_path, tree)
    assert process_lister.find_listing_fault(proc) == ""
    write_process_list(tmp_path, {**tree, me: 1001})
    assert process_lister.find_listing_fault(proc).startswith(f"process {me} ")
    (tmp_path / NAME).unlink()
    assert "cannot be read" in process_lister.find_listing_fault(proc)


def test_a_process_that_takes_a_number_between_two_listings_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def listed(_: Proc) -> dict[int, int]:
        seen.append(0)
        return {1: 0, len(seen) + 1_000_000 - len(seen) % 2: 5}  # another one in each turn

    monkeypatch.setattr(process_lister, "list_with_uids", listed)
    tmp_path.chmod(0o700)
    write_process_list(tmp_path, {1: 0})
    assert process_lister.find_listing_fault(Proc(pins=str(tmp_path))) == ""


def test_another_users_folder_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/sys/fs/bpf` may be everybody's to write in."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FileExistsError):
        process_lister.make_pin_folder(str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        process_lister.make_pin_folder(str(tmp_path / "link"))
