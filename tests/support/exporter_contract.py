# SPDX-License-Identifier: Apache-2.0
"""The names of all series that the exporter owes: changing one breaks somebody's dashboard."""

from __future__ import annotations

import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "data/exporter/node.prom"  # has each family; see test_exposition
CONTRACT = frozenset(re.findall(r"^# TYPE (\w+)", GOLDEN.read_text(), re.M))
