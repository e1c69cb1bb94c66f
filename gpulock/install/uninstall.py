# SPDX-License-Identifier: Apache-2.0
"""What the schedulers say alike where jobs hold devices, and the line that a force leaves."""

from __future__ import annotations

import syslog
from typing import Final

from gpulock.errors import one_line

FORCE: Final = "--force --reason TEXT"
WAIT_OR_REAP: Final = "gpulock reap frees what dead jobs have left; wait for the others"


def log_forced_uninstall(sentence: str) -> None:
    """Leave a line for the administrator."""
    syslog.openlog("gpulock", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, one_line(f"gpulock: {sentence}"))
