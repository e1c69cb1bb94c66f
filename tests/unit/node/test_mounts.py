# SPDX-License-Identifier: Apache-2.0
"""What an open file is, told without asking a file system that may never answer."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.node import mounts
from gpulock.node.mounts import Mounts, cached_file_key
from gpulock.node.procfs import device_file_key
from tests.support.faults import raising

Opened = tuple[Path, int]
# what str.splitlines() takes for an end of line, and no kernel
LINE_ENDS = ["\v", "\f", "\r", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.fixture(params=["/dev/null", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Open a device node, or a file that stands for one, and keep it open."""
    path = Path("/dev/null") if request.param == "/dev/null" else tmp_path / "nvidia0"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    yield path, fd
    os.close(fd)


class Fake:
    """A /proc in which this process's files are on a mount of any type."""

    def __init__(self, root: Path, opened: Opened) -> None:
        self.root, self.fd = root, str(opened[1])
        self.folder = root / "900/fd"
        self.folder.mkdir(parents=True)
        (self.folder / self.fd).symlink_to(opened[0])
        (root / "900/fdinfo").mkdir()
        (root / "900/fdinfo" / self.fd).write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t77\n")
        (root / "self").mkdir()

    def lists(self, kind: str, where: str = "self") -> None:
        """Let a mount table have the mount."""
        line = f"77 1 0:5 / /x rw,nosuid - {kind} source rw\n"
        (self.root / where / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n{line}")

    def key(self) -> tuple[int, int, int] | None:
        return Mounts(str(self.root)).key(900, str(self.folder), self.fd)


@pytest.fixture
def fake(tmp_path: Path, opened: Opened) -> Fake:
    (tmp_path / "proc").mkdir()
    return Fake(tmp_path / "proc", opened)


never = raising(AssertionError("a file system was asked that may never answer"))


def test_what_this_process_has_open_is_told_as_stat_tells_it(opened: Opened) -> None:
    found = Mounts("/proc").key(os.getpid(), "/proc/self/fd", str(opened[1]))
    assert found == device_file_key(os.stat(opened[0]))


def test_what_the_kernel_has_cached_is_the_same(opened: Opened) -> None:
    assert cached_file_key(str(opened[0])) == device_file_key(os.stat(opened[0]))


def test_where_ctypes_cannot_be_loaded_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctypes", None)
    with pytest.raises(OSError, match="no ctypes"):
        cached_file_key("/dev/null")


@pytest.mark.parametrize("kind", ["fuse.sshfs", "fuse", "nfs4", "cifs", "9p", "lustre", "autofs"])
@pytest.mark.parametrize("where", ["self", "900"])
def test_one_of_a_user_or_of_a_network_is_not_asked_and_has_no_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    fake.lists(kind, where)
    monkeypatch.setattr(os, "stat", never)
    monkeypatch.setattr(mounts, "cached_file_key", never)
    assert fake.key() is None


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_path_that_a_user_mounts_at_is_no_line_of_the_table(
    fake: Fake, opened: Opened, end: str
) -> None:
    """The kernel escapes blanks and newlines of a path alone: the rest looked like mount 77."""
    fake.lists("devtmpfs")
    table = fake.root / "self/mountinfo"
    table.write_text(f"{table.read_text()}90 1 0:9 / /tmp/a{end}77\u2003b rw - fuse.x y rw\n")
    assert fake.key() == device_file_key(os.stat(opened[0]))


def test_a_file_that_was_closed_meanwhile_is_not_there(fake: Fake) -> None:
    (fake.folder / fake.fd).unlink()
    with pytest.raises(FileNotFoundError):
        fake.key()


@pytest.mark.parametrize(
    ("fault", "uid", "known"),
    [
        (mounts.StatxError(errno.EACCES, "kept"), 0, True),  # FUSE keeps it from root as well
        (mounts.StatxError(errno.EACCES, "kept"), 1000, False),
        (mounts.StatxError(errno.EIO, "spoilt"), 0, True),  # of an inode that FUSE gave up
        (mounts.StatxError(errno.ENOTCONN, "spoilt"), 0, True),
        (mounts.StatxError(errno.ENOSYS, "none"), 0, False),
        (FileNotFoundError(errno.ENOENT, "gone"), 0, False),
        (OSError(errno.ENOMEM, "libffi.so.8"), 0, False),  # a job's own limits
        (OSError(errno.EMFILE, "libffi.so.8"), 0, False),  # before any file was asked
    ],
)
def test_what_a_server_keeps_from_root_or_spoilt_is_no_device_and_blinds_nobody(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, fault: OSError, uid: int, known: bool
) -> None:
    """A mount of a user's that stands in no table: to anybody else it may be anything."""
    monkeypatch.setattr(mounts, "cached_file_key", raising(fault))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    if known:
        assert fake.key() is None
    else:
        with pytest.raises(type(fault)):
            fake.key()


def test_a_table_is_read_once_however_many_files_are_in_none(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may fill the table of their own namespace, until it cannot be read at all."""
    read: list[str] = []
    real = mounts.read_mount_table

    def counted(path: str, seconds: float) -> str:
        read.append(path)
        return real(path, seconds)

    monkeypatch.setattr(mounts, "read_mount_table", counted)
    seen = Mounts(str(fake.root))
    keys = {seen.key(900, str(fake.folder), fake.fd) for _ in range(3)}
    assert len(keys) == 1
    assert read == [f"{fake.root}/self/mountinfo", f"{fake.root}/900/mountinfo"]


def test_a_table_that_takes_too_long_tells_nothing(fake: Fake) -> None:
    """Its owner may have stacked thousands of mounts; what is in no table is told otherwise."""
    fake.lists("nfs4", "900")
    path = f"{fake.root}/900/mountinfo"
    assert "nfs4" in mounts.read_mount_table(path, 60.0)
    assert mounts.read_mount_table(path, -1.0) == ""
