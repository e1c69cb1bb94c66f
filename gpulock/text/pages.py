# SPDX-License-Identifier: Apache-2.0
"""Where the pages lie that messages name: a message says `docs/slurm.md`, a person needs a path."""

from __future__ import annotations

import re
from pathlib import Path

import gpulock

_PACKAGE = Path(gpulock.__file__).resolve().parent
# In a wheel, in a checkout, from a .deb or an .rpm.
FOLDERS = (_PACKAGE / "share/docs", _PACKAGE.parent / "docs", Path("/usr/share/doc/gpulock/docs"))
PAGE = re.compile(r"(?<![\w/.-])docs/((?:facts/)?[\w-]+\.md)")


def name_pages(text: str) -> str:
    """Return a text that names each page by its path here; one that is not here stays as it is."""
    return PAGE.sub(lambda found: _find_page(found[1]) or found[0], text)


def _find_page(name: str) -> str:
    """Return the path of a page, or nothing."""
    return next((str(folder / name) for folder in FOLDERS if (folder / name).is_file()), "")
