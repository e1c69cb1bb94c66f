# SPDX-License-Identifier: Apache-2.0
"""What an open file is, without asking a file system that may never answer.

Hot, loaded where a process has a file open whose path may be a device's. stat(2) of a file in a
FUSE mount asks the user's own server; one that does not answer hangs the caller for good (state D:
no signal ends it), and with it every hook.
The name in /proc/PID/fd proves nothing: a mount that was taken away lazily shows as `/nvidia0`.
So the mount comes first, from fdinfo and mountinfo, which the kernel answers alone (proc(5)).
"""

import errno
import os
import stat
import time

from gpulock.node.procfs import device_file_key
from gpulock.store import atomic

LONG, SHORT = 1.0, 0.1  # seconds to read our own mount table, and another user's, which may be long
PIECE = 1 << 12  # bytes
HEAD = 256  # bytes of fdinfo: pos, flags and mnt_id come first
STACKED = "overlay"  # may stand on a file system of the user's
# of the kernel's own: a stat is answered at once
KERNEL_FILE_SYSTEMS = (atomic.LOCAL_FILE_SYSTEMS - {STACKED}) | {"devtmpfs"}
AT_FDCWD, DONT_SYNC, BASIC = -100, 0x4000, 0x7FF  # linux/fcntl.h, linux/stat.h
STATX_BYTES, MODE, INODE, RDEV, DEV = 256, 28, 32, 128, 136  # size and offsets of struct statx


class StatxError(OSError):
    """statx(2) itself failed: not what leads to it, such as loading ctypes."""


class Mounts:
    """The types of the mounts that were met in one look."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._read: set[str] = set()
        self._types: dict[str, str] = {}

    def key(self, pid: int, folder: str, fd: str) -> "tuple[int, int, int] | None":
        """Return what tells the open file `folder`/`fd` from others, None for one that is no node.

        (rdev, 0, 0) of a device, (0, st_dev, inode) of another file. Raises OSError.
        """
        kind = self._kind(pid, folder, fd)
        if kind in KERNEL_FILE_SYSTEMS:
            return device_file_key(os.stat(f"{folder}/{fd}"))
        if kind and kind != STACKED:
            return None  # of a network, or of a user: no device is opened through it
        try:
            return cached_file_key(f"{folder}/{fd}")
        except StatxError as fault:
            if os.geteuid() != 0 or fault.errno in (errno.ENOSYS, errno.ENOENT, errno.ENOMEM):
                raise
            # to root only FUSE says so, and what else asks a server: EACCES, EIO of an inode that
            # went bad; no device is opened through it, and of a device the kernel knows all
            return None

    def _kind(self, pid: int, folder: str, fd: str) -> str:
        """Return the type of the file system, empty where no mount table has it."""
        try:
            info = atomic.read_head(f"{folder}info/{fd}", HEAD).decode("ascii", "replace")
        except OSError:
            return ""
        words = info.partition("mnt_id:")[2].split(None, 1)
        mount = words[0] if words else ""
        for owner in ("self", str(pid)):
            if mount not in self._types and owner not in self._read:
                self._read.add(owner)  # once a look: it may be long, or too long to be read
                self._add(f"{self._root}/{owner}/mountinfo", LONG if owner == "self" else SHORT)
        return self._types.get(mount, "")

    def _add(self, path: str, seconds: float) -> None:
        try:
            lines = read_mount_table(path, seconds).split("\n")
        except OSError:
            return
        for line in lines:  # a path in it may hold what splitlines() takes for an end of line
            kind = line.partition(" - ")[2].split(None, 1)
            if kind:
                self._types[line.split(None, 1)[0]] = kind[0]


def read_mount_table(path: str, seconds: float) -> str:
    """Return a mount table, empty where it takes longer to be read than that; raise OSError.

    Of 5,000 mounts on one another the kernel takes five seconds (measured).
    """
    late = time.monotonic() + seconds
    parts: list[bytes] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        while more := os.read(fd, PIECE):
            parts.append(more)
            if time.monotonic() > late:
                return ""
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "surrogateescape")


def cached_file_key(path: str) -> tuple[int, int, int]:
    """Return the same from what the kernel has cached: statx(2) with AT_STATX_DONT_SYNC.

    FUSE and NFS answer that without their server. ctypes is loaded here alone, for a mount that
    stands in no table. Raises OSError, also where ctypes cannot be loaded.
    """
    try:
        import ctypes
    except ImportError as fault:  # a job's own limits
        raise OSError(errno.ENOSYS, f"no ctypes: {fault}", path) from fault
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(STATX_BYTES)
    if libc.statx(AT_FDCWD, os.fsencode(path), DONT_SYNC, BASIC, buffer) != 0:
        code = ctypes.get_errno()
        if code == errno.ENOENT:
            raise FileNotFoundError(code, os.strerror(code), path)
        raise StatxError(code, os.strerror(code), path)

    def number(offset: int, size: int = 4) -> int:
        return int.from_bytes(buffer.raw[offset : offset + size], "little")

    if stat.S_ISCHR(number(MODE, 2)):
        return (os.makedev(number(RDEV), number(RDEV + 4)), 0, 0)
    return (0, os.makedev(number(DEV), number(DEV + 4)), number(INODE, 8))
