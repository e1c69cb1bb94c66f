# SPDX-License-Identifier: Apache-2.0
"""A web configuration that is read again when it, or a certificate, changes.

A thread of its own looks; requests go on by the old one until the new one is whole. A change
that does not load changes nothing, and `last_reload_successful` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpulock_exporter.web.serve import WebSettings
from gpulock_exporter.webconfig.config import load_web_config
from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles

LOOK_SECONDS = 2.0
RETRY_SECONDS = 30.0  # what was wrong need not be in a file


class Reloader:
    """Keep a server's settings those of a file; the first load is the caller's to survive."""

    def __init__(self, path: str, log: Callable[[str], None]) -> None:
        self._path = path
        self._log = log
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0
        self._reason = ""
        self.settings = self._load()
        self.last_reload_successful = True

    def look(self) -> WebSettings | None:
        """Return new settings when a file has changed and all of it loads, else None."""
        is_due = not self.last_reload_successful and time.monotonic() >= self._retry_at
        if not (self._files.changed() or is_due):
            return None
        try:
            self.settings = self._load()
        except (WebConfigError, OSError, RuntimeError) as error:  # out of descriptors, of threads
            self.last_reload_successful = False
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if str(error) != self._reason:
                self._log(f"web configuration not reloaded, the old one stays: {error}")
            self._reason = str(error)
            return None
        self.last_reload_successful = True
        self._reason = ""
        self._log(f"{self._path}: reloaded")
        return self.settings

    def start(self, adopt: Callable[[WebSettings], None], seconds: float = LOOK_SECONDS) -> None:
        """Look every so often, and hand new settings to `adopt`, until `stop`."""

        def watch() -> None:
            while not self._stopped.wait(seconds):
                settings = self.look()
                if settings is not None:
                    adopt(settings)

        self._thread = threading.Thread(target=watch, name="web-config", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _load(self) -> WebSettings:
        self._files = WebConfigFiles()  # also of a load that fails: its repair must be seen
        settings, notes = load_web_config(self._path, self._files)
        for note in notes:
            self._log(f"{self._path}: {note}")
        return settings
