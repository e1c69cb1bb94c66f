# SPDX-License-Identifier: Apache-2.0
"""Write the JSON of the dashboards: `python -m dashboards.make`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dashboards.cluster import cluster
from dashboards.job import job
from dashboards.node import node

FOLDER = Path(__file__).resolve().parent


def made() -> Mapping[str, str]:
    """Return the text of each file, by its name."""
    boards = (cluster(), job(), node())
    return {f"{one['uid']}.json": json.dumps(one, indent=1) + "\n" for one in boards}


def main() -> None:
    """Write them."""
    for name, text in made().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
