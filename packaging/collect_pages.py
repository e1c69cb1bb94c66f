# SPDX-License-Identifier: Apache-2.0
"""Collect the pages of the site: `python packaging/collect_pages.py FOLDER`, as `make docs` does.

The pages stand as in the repository, README.md as its front page. So the links between them are
those of the repository.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/pictures/*.png",
    "docs/examples/**/*",
    "exporter/README.md",
    "prolog/drop-env.c",
    "tests/gpu/README.md",
    "LICENSE",
)


def collect_pages(folder: Path) -> None:
    """Copy the pages, and what they link to, into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(found for glob in PAGES for found in ROOT.glob(glob)):
        if path.is_dir():
            continue
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


if __name__ == "__main__":
    collect_pages(Path(sys.argv[1]))
