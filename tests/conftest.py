# SPDX-License-Identifier: Apache-2.0
"""Say at the end how many points were tried: a sweep that tried none proves nothing."""

from __future__ import annotations

import pytest

from tests.sweep.tally import TALLY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a case and kind."""
    for line in TALLY.lines():
        terminalreporter.write_line(line)
