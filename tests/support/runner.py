# SPDX-License-Identifier: Apache-2.0
"""click's runner of commands, which keeps stderr apart: click 8.1 must be told to."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner

_APART: dict[str, Any] = (
    {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
)


def command_runner() -> CliRunner:
    """Return a runner whose results have stdout and stderr of their own."""
    return CliRunner(**_APART)
