# SPDX-License-Identifier: Apache-2.0
"""The dashboards that are shipped, and what they ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "exporter" / "dashboards"


def shipped_boards() -> dict[str, dict[str, Any]]:
    """Return each dashboard by the name of its file, without the suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def board_queries(board: dict[str, Any]) -> list[str]:
    """Return every expression of a dashboard, as it is written in it."""
    marks = [one["expr"] for one in board["annotations"]["list"]]
    panels = board["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())] + marks
