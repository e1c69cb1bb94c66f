# SPDX-License-Identifier: Apache-2.0
"""The files a web configuration is made of: read whole, and remembered to see them change."""

from __future__ import annotations

import errno
import os
import stat

_LARGEST = 1024 * 1024  # a CA bundle has a few hundred KiB

Stamp = tuple[int, int, int, int, int]


class WebConfigError(ValueError):
    """A mistake in a web configuration: nothing is served by it."""

    def __init__(self, path: str, line: int, what: str) -> None:
        super().__init__(f"{path}:{line}: {what}")


class WebConfigFiles:
    """Every file that was read for one configuration, as it was then."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp | None] = {}

    def read(self, path: str) -> bytes:
        """Read a file, and remember it; also when that fails, so that its repair is seen."""
        self._stamps[path] = _current_stamp(path)
        # Not blocked by a pipe: a reload must come to an end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "this is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(_LARGEST + 1)
        finally:
            os.close(descriptor)
        if len(content) > _LARGEST:
            raise OSError(errno.EFBIG, f"this is larger than {_LARGEST} bytes")
        self._stamps[path] = _file_stamp(
            status
        )  # from before the reading: a write meanwhile is seen
        return content

    def changed(self) -> bool:
        """Tell whether any of them is another one now, behind links too."""
        return any(_current_stamp(path) != stamp for path, stamp in self._stamps.items())


def _current_stamp(path: str) -> Stamp | None:
    try:
        return _file_stamp(os.stat(path))
    except OSError:
        return None


def _file_stamp(status: os.stat_result) -> Stamp:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
