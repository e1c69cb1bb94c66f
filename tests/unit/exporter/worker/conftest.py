# SPDX-License-Identifier: Apache-2.0
"""Supervisors that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exporter_workers import Nest


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Nest]:
    found = Nest(tmp_path)
    yield found
    for supervisor in found.made:
        supervisor.close()
