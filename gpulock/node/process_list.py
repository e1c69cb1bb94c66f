# SPDX-License-Identifier: Apache-2.0
"""Which processes there are, and their effective users: one read from the kernel.

Hot, loaded where a node has many processes. gpulockd pins a BPF iterator (daemon.core.process_list)
that writes two words for each process: its pid and its effective uid. `/proc` says the same, for a
stat(2) of each. Where anything is odd there is no list, and the caller reads `/proc`.
"""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "processes"
INIT = 1
END = 0xFFFFFFFF  # in place of a pid: the list is whole
FORMAT = 0x67706C01  # in place of that one's uid: what wrote the list, and in which form
PIECE, MOST = 1 << 15, 1 << 25  # bytes: what one read(2) brings; 4,194,304 processes


def read_process_list(folder: str) -> "tuple[list[int], list[int]] | None":
    """Return the pids and the effective uids of all processes, None where no list can be trusted.

    Of the first pid namespace, which must be the caller's. Kernel threads are left out. A process
    may stand there twice. Init stands there in any case: a kernel may keep it from BPF programs.
    """
    parts: list[bytes] = []
    size = 0
    try:
        fd = open_process_list(folder)
        try:
            while part := os.read(fd, PIECE):
                parts.append(part)
                size += len(part)
                if size > MOST:
                    return None
        finally:
            os.close(fd)
    except OSError:
        return None
    if size % 8:
        return None
    words = memoryview(b"".join(parts)).cast("I")
    pids, uids = words[0::2].tolist(), words[1::2].tolist()
    if not pids or pids.pop() != END or uids.pop() != FORMAT:
        return None
    if INIT not in pids[:1]:
        pids.append(INIT)
        uids.append(0)
    return pids, uids


def leave_out_users(
    pids: "list[int]", uids: "list[int]", is_left_out: "Callable[[int, int], bool]"
) -> dict[int, int]:
    """Return the effective uid of each process, by its pid, but of users who are left out.

    A user is judged by one process, not by each. Where that one vanished meanwhile (OSError), the
    user's processes stay. One that stands twice stays if either user does.
    """
    kept = set(uids)
    for uid in tuple(kept):
        try:
            if is_left_out(pids[uids.index(uid)], uid):
                kept.remove(uid)
        except OSError:
            continue
    return {pid: uid for pid, uid in zip(pids, uids) if uid in kept}


def open_process_list(folder: str) -> int:
    """Open the list for reading: each open is a look of its own; raise OSError.

    `/sys/fs/bpf` may be everybody's to write in. So folder and list must be of this process's user,
    and writable for nobody else.
    """
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        refuse_of_others(above, folder)
        path = f"{folder}/{NAME}"
        found = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            refuse_of_others(found, path)
        except OSError:
            os.close(found)
            raise
        return found
    finally:
        os.close(above)


def refuse_of_others(fd: int, path: str) -> None:
    """Raise PermissionError where a file is not of this process's user, or others may write it."""
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} is not this user's alone")
