# SPDX-License-Identifier: Apache-2.0
"""Print the path of pip's own wheel, out of Debian's archive: for a Python that came without pip.

python3 -m tests.root.pip_wheel
"""

from __future__ import annotations

import sys

from tests.root.archive import Archive, ArchiveError
from tests.root.build import cache_folder, unpack

RELEASE, PACKAGE = "trixie", "python3-pip-whl"  # the first for 3.13, and still for 3.9


def main() -> int:
    """Print the path, or in one sentence why there is none."""
    cache = cache_folder()
    folder = cache / f"{PACKAGE}-{RELEASE}"  # a cache may have an earlier one
    try:
        if not folder.exists():
            files = Archive(RELEASE, cache / "debs").fetch([PACKAGE])
            folder.mkdir()
            unpack(files, folder)
        print(next(folder.glob("usr/share/python-wheels/pip-*.whl")))
    except (ArchiveError, OSError, StopIteration) as fault:
        print(f"no pip is to be had of Debian either: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
