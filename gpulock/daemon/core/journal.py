# SPDX-License-Identifier: Apache-2.0
"""What gpulockd says: one line an event, and of a state that lasts one line when it begins.

The journal takes the level from `<N>` before the line (sd-daemon(3)). Elsewhere the lines go to
stderr and to syslog. What cannot be written stops nobody.
"""

from __future__ import annotations

import os
import syslog
from collections.abc import Mapping

from gpulock.errors import one_line

WHO = "gpulockd"
ERROR, WARNING, NOTICE, INFO = (
    syslog.LOG_ERR,
    syslog.LOG_WARNING,
    syslog.LOG_NOTICE,
    syslog.LOG_INFO,
)
LENGTH = 600  # characters of a line


class DaemonJournal:
    """Lines go to `fd`; with `levels` they have one, without they go to syslog as well.

    `quiet`: not to syslog, of which a simulated node has none.
    """

    def __init__(self, fd: int = 2, levels: bool = False, quiet: bool = False) -> None:
        self._fd = fd
        self._levels = levels
        self.quiet = quiet
        self._standing: dict[str, dict[str, str]] = {}

    def say(self, level: int, text: str) -> None:
        """Say one line."""
        line = one_line(text)[:LENGTH]
        shown = f"<{level}>{line}\n" if self._levels else f"{WHO}: {line}\n"
        try:
            os.write(self._fd, shown.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
        if not self._levels and not self.quiet:
            syslog.openlog(WHO, syslog.LOG_PID, syslog.LOG_DAEMON)
            syslog.syslog(level, line)

    def log_changes(self, part: str, found: Mapping[str, str], level: int = WARNING) -> None:
        """Say what of `found` is new; the rest was said when it began.

        `found` is all that stands now in that part, by a key that stays the same while it lasts.
        """
        known = self._standing.get(part, {})
        for key, text in found.items():
            if key not in known:
                self.say(level, text)
        for key, text in known.items():
            if key not in found:
                self.say(INFO, f"no longer: {text}")
        self._standing[part] = dict(found)
