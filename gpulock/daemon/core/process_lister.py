# SPDX-License-Identifier: Apache-2.0
"""Pin what lists the node's processes in one read: a BPF iterator over tasks.

Warm, once at the start of gpulockd. The iterator outlives it, and needs nobody: hooks and gpulockd
read it (gpulock.node.process_list), or `/proc` where it is missing. It reads nothing but pids,
flags and effective uids, and changes nothing.
"""

from __future__ import annotations

import os
import stat
from struct import pack
from typing import Final

from gpulock.alloc.process_owner import HOST_PIDS
from gpulock.daemon.core.kernel_types import FUNCTION, KernelTypes
from gpulock.isolation.bpf import (
    CALL,
    EXIT,
    JUMP,
    JUMP_IF,
    LOAD_WORD,
    MOVE,
    KernelBuffer,
    bpf_syscall,
    close_descriptors,
    encode_bpf_instruction,
    load_bpf_program,
)
from gpulock.node.process_list import END, FORMAT, INIT, NAME, read_process_list
from gpulock.node.procfs import KTHREADD, PINS, Proc
from gpulock.node.settings import Settings

BTF: Final = "/sys/kernel/btf/vmlinux"
PROC_LISTING: Final = "proc"  # PROCESS_LIST: no iterator
# of linux/bpf.h: commands, type and way of attaching, helper
_PIN, _LINK = 6, 28
_TRACING, _ITERATOR = 26, 28
_SEQ_WRITE: Final = 127
# opcodes of linux/bpf_common.h and linux/bpf.h that isolation.bpf has no use for
_MOVE_ALL, _ADD, _LOAD_LONG, _STORE_WORD, _STORE_NUMBER = 0xBF, 0x07, 0x79, 0x63, 0x62
_JUMP_SAME, _JUMP_BITS = 0x1D, 0x45
_EXITING, _KERNEL_THREAD = 0x4, 0x200000  # PF_EXITING, PF_KTHREAD of linux/sched.h
_PROGRAM: Final = b"gpulock_procs"
_SIGNED: Final = 1 << 31
_TURNS: Final = 3  # a pid that a listing has may be another process's in the next one


class TaskOffsets:
    """Where the kernel keeps what the program reads; raise ValueError where it does not tell."""

    def __init__(self, types: KernelTypes) -> None:
        self.flags = types.member_offset("task_struct", "flags")
        self.pid = types.member_offset("task_struct", "pid")
        self.tgid = types.member_offset("task_struct", "tgid")
        self.cred = types.member_offset("task_struct", "real_cred")
        self.euid = types.member_offset("cred", "euid")
        self.iterator = types.type_id(FUNCTION, "bpf_iter_task")


def assemble_process_lister(at: TaskOffsets) -> bytes:
    """Return the program that writes pid and effective uid of each process, and an end. Pure.

    A thread is passed over unless its number is its process's. While a thread takes its leader's
    number by an exec, the dead leader may have the thread's: what is exiting is written in any
    case. So each process stands there once at least.
    """
    seq, task, stack, pid, uid = 7, 8, 10, 3, 4
    code: list[tuple[int, int, int, int | str, int] | str] = [
        (_MOVE_ALL, 6, 1, 0, 0),  # struct bpf_iter__task: meta, task
        (_LOAD_LONG, seq, 6, 0, 0),
        (_LOAD_LONG, seq, seq, 0, 0),  # struct bpf_iter_meta: seq
        (_LOAD_LONG, task, 6, 8, 0),
        (JUMP_IF, task, 0, "end", 0),
        (LOAD_WORD, 2, task, at.flags, 0),
        (_JUMP_BITS, 2, 0, "out", _KERNEL_THREAD),
        (LOAD_WORD, pid, task, at.tgid, 0),
        (LOAD_WORD, 5, task, at.pid, 0),
        (_JUMP_SAME, pid, 5, "take", 0),
        (_JUMP_BITS, 2, 0, "take", _EXITING),
        (JUMP, 0, 0, "out", 0),
        "take",
        (MOVE, uid, 0, 0, 0),
        (_LOAD_LONG, 5, task, at.cred, 0),
        (JUMP_IF, 5, 0, "store", 0),  # never; the verifier wants it asked
        (LOAD_WORD, uid, 5, at.euid, 0),
        "store",
        (_STORE_WORD, stack, pid, -8, 0),
        (_STORE_WORD, stack, uid, -4, 0),
        (JUMP, 0, 0, "write", 0),
        "end",
        (_STORE_NUMBER, stack, 0, -8, END),
        (_STORE_NUMBER, stack, 0, -4, FORMAT),
        "write",
        (_MOVE_ALL, 1, seq, 0, 0),
        (_MOVE_ALL, 2, stack, 0, 0),
        (_ADD, 2, 0, 0, -8),
        (MOVE, 3, 0, 0, 8),
        (CALL, 0, 0, 0, _SEQ_WRITE),  # what does not fit is written at the next read(2)
        "out",
        (MOVE, 0, 0, 0, 0),
        (EXIT, 0, 0, 0, 0),
    ]
    steps = [step for step in code if not isinstance(step, str)]
    labels: dict[str, int] = {}
    for step in code:
        if isinstance(step, str):
            labels[step] = code.index(step) - len(labels)
    found = b""
    for place, (opcode, dst, src, off, number) in enumerate(steps):
        distance = labels[off] - place - 1 if isinstance(off, str) else off
        signed = number - 2 * _SIGNED if number >= _SIGNED else number
        found += encode_bpf_instruction(opcode, dst, src, distance, signed)
    return found


def ensure_process_list(settings: Settings, folder: str = PINS, btf: str = BTF) -> str:
    """Pin the iterator where it is wanted and not there; return why there is none, or nothing.

    Where PROCESS_LIST is `proc`, one that is there is taken away.
    """
    if settings.simulation or settings.proc_root != "/proc":
        return "no process of this machine is looked at"
    if settings.process_list == PROC_LISTING:
        remove_process_list(folder)
        return f"PROCESS_LIST={PROC_LISTING}"
    if read_process_list(folder) is not None:
        return ""
    if HOST_PIDS not in Proc().pid_namespace(""):
        return "this is not the first pid namespace"
    try:
        pin_process_list(folder, btf)
        if why := find_listing_fault(Proc(pins=folder)):
            remove_process_list(folder)
            return why
    except (OSError, ValueError) as fault:
        return str(fault)
    return ""


def pin_process_list(folder: str, btf: str = BTF) -> None:
    """Load the program and pin its iterator, in one step in place of another one there.

    Raises OSError, and ValueError where the kernel does not tell of its structures.
    """
    with open(btf, "rb") as file:
        at = TaskOffsets(KernelTypes(file.read()))
    program = link = -1
    try:
        code = assemble_process_lister(at)
        program = load_bpf_program(_TRACING, code, _PROGRAM, (_ITERATOR, at.iterator))
        link, _ = bpf_syscall(_LINK, pack("<IIII", program, 0, _ITERATOR, 0))
        make_pin_folder(folder)
        new = f"{folder}/{NAME}_{os.getpid()}"  # bpffs takes no name with a dot
        path = KernelBuffer(os.fsencode(new) + b"\0")
        bpf_syscall(_PIN, pack("<QI", path.address, link))
        os.rename(new, f"{folder}/{NAME}")
    finally:
        close_descriptors(program, link)


def make_pin_folder(folder: str) -> None:
    """Make the folder of the pins, root's alone; raise OSError where it is another user's."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise
        os.chmod(folder, 0o700)


def remove_process_list(folder: str = PINS) -> None:
    """Take the iterator away: the kernel frees it once nobody reads it. None is no error."""
    try:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
    except OSError:
        pass


def find_listing_fault(proc: Proc) -> str:
    """Return what the list has otherwise than `/proc`, or nothing: nobody may be left out."""
    doubted: set[int] = set()
    for turn in range(_TURNS):
        known = {INIT, KTHREADD, *proc.kernel_threads()}
        before = list_with_uids(proc)
        found = read_process_list(proc.pins)
        after = list_with_uids(proc)
        if found is None:
            return f"{proc.pins}/{NAME} cannot be read"
        told = dict(zip(*found))
        wrong = {p for p, uid in before.items() if after.get(p) == uid != told.get(p)} - known
        doubted = wrong & doubted if turn else wrong
    return f"process {min(doubted)} is left out of {proc.pins}/{NAME}" if doubted else ""


def list_with_uids(proc: Proc) -> dict[int, int]:
    """Return the effective uid of each process, by its pid."""
    found: dict[int, int] = {}
    for pid in proc.pids():
        try:
            found[pid] = os.stat(f"{proc.root}/{pid}").st_uid
        except OSError:
            continue
    return found
