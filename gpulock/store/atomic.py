# SPDX-License-Identifier: Apache-2.0
"""Read and replace one small file without trusting what stands in its place.

Hot. A file is opened O_NOFOLLOW|O_NONBLOCK and must be regular (a symlink or a FIFO planted by
somebody else is an error, never followed, never waited for); it is replaced by a rename.
"""

import errno
import os
import stat

OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
OPEN_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT)  # no room: an administrator's doing, no fault of the node's
# file systems on which mkdir and rename are atomic and local (/proc/self/mountinfo names)
LOCAL_FILE_SYSTEMS = frozenset(
    ("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay")
)
LIMIT = 1 << 16  # bytes: an owner record has about 700, a settings file a few thousand


def read_file(path: str, limit: int = LIMIT, dir_fd: "int | None" = None) -> bytes:
    """Return the whole of a regular file; raise OSError (EINVAL: not regular, EFBIG: too long)."""
    fd = os.open(path, OPEN_READ, dir_fd=dir_fd)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if info.st_size > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", path)
        data = b""
        while more := os.read(fd, max(info.st_size + 1 - len(data), 4096)):
            data += more
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"longer than {limit} bytes", path)
            if len(data) == info.st_size:
                break  # the usual file is whole at once: replaced by rename alone, it does not grow
        return data
    finally:
        os.close(fd)


def read_text(path: str, limit: int = LIMIT, dir_fd: "int | None" = None) -> str:
    """Return the file as text; bytes that are no UTF-8 survive as surrogates."""
    return read_file(path, limit, dir_fd).decode("utf-8", "surrogateescape")


def write_descriptor(fd: int, data: bytes) -> None:
    """Write every byte of `data`; raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file(
    path: str,
    data: bytes,
    mode: int = 0o644,
    dir_fd: "int | None" = None,
    owner: "tuple[int, int] | None" = None,
    durable: bool = False,
) -> None:
    """Put `data` in the place of `path`, whole or not at all; raise OSError.

    `owner` (uid, gid) is given to the new file where it is not the caller's already. The file is
    written beside and renamed in. What an interrupted call leaves is hidden, and tells its writer:
    `.name.<pid>.<random>`; a reconcile removes it once that process is gone.
    A `durable` file outlives a power cut, with the new content once this returns, and with the old
    or the new one before. Of another the name may outlive one without any content, and nothing of
    the old one is left: a file system allocates late.
    """
    folder, slash, name = path.rpartition("/")
    beside = f"{folder}{slash}{name_temporary(name)}"
    fd = os.open(beside, OPEN_NEW, 0o600, dir_fd=dir_fd)
    try:
        try:
            write_descriptor(fd, data)
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        if durable:
            fsync_path(f"{folder}{slash}.", dir_fd)  # a site may have a link there
    except BaseException:
        remove_quietly(beside, dir_fd)
        raise


def name_temporary(name: str) -> str:
    """Return a hidden name for what shall replace a file; a reconcile removes a dead process's."""
    return f".{name}.{os.getpid()}.{os.urandom(6).hex()}"


def fsync_path(path: str, dir_fd: "int | None" = None) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut; raise OSError."""
    fd = os.open(path, OPEN_READ, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_file(path: str, data: bytes = b"") -> int:
    """Add to the end of a file, which may be made; return its new size; raise OSError.

    To make an empty one needs no room.
    """
    return write_file(path, data, OPEN_APPEND)


def create_file(path: str, data: bytes) -> None:
    """Write a file that is not there yet; raise OSError. A crash may leave it cut short."""
    write_file(path, data, OPEN_NEW)


def write_file(path: str, data: bytes, flags: int) -> int:
    """Write to a file that is opened like that; return its size; raise OSError."""
    fd = os.open(path, flags, 0o644)
    try:
        write_descriptor(fd, data)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_head(path: str, size: int) -> bytes:
    """Return the beginning of a file by one read(2), which is all of a short one; raise OSError."""
    fd = os.open(path, OPEN_READ)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def mkdir_if_missing(path: str) -> None:
    """Make one folder, or accept the one that is there."""
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return


def remove_quietly(path: str, dir_fd: "int | None" = None) -> None:
    """Remove a file where that is possible; for clean-up after an error that counts more."""
    try:
        os.unlink(path, dir_fd=dir_fd)
    except OSError:
        return


def remove_folder(path: str) -> None:
    """Remove a folder with all in it, or what stands in its place; no link is followed.

    Raises OSError.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    for name in os.listdir(path):
        remove_folder(f"{path}/{name}")
    os.rmdir(path)
