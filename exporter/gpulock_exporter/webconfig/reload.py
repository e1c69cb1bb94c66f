# SPDX-License-Identifier: Apache-2.0
"""A web configuration that is read again when it, or a certificate, changes.

A thread of its own looks; requests go on by the old one until the new one is whole, and is written
no more. A change that does not load changes nothing, and `last_reload_successful` says so.

A TLS context goes as well once it keeps many sessions. TLS 1.2 without tickets has OpenSSL keep one
for each client, 1 KiB, and Python has no switch for that. Until Python 3.13.0 it goes with its
connection: SSL_free drops what was not shut down. 3.13.5 calls SSL_set_shutdown before that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig.config import load_web_config
from gpulock_exporter.webconfig.files import WebConfigError, WebConfigFiles

LOOK_SECONDS = 2.0
RETRY_SECONDS = 30.0  # what was wrong need not be in a file
SETTLE_SECONDS = 0.2  # a file that is written in its place is empty first: no TLS and no passwords
MOST_SESSIONS = 1000  # OpenSSL's own bound is 20,480, 20 MiB


class Reloader:
    """Keep a server's settings those of a file; the first load is the caller's to survive."""

    def __init__(self, path: str, log: Callable[[str], None]) -> None:
        self._path = path
        self._log = log
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0
        self._reason = ""
        self.settings, notes = self._load()
        self._tell(notes)
        self.last_reload_successful = True

    def look(self) -> WebSettings | None:
        """Return new settings when a file has changed and all of it loads, else None.

        Where the TLS context alone is to go, what is known of users and passwords stays.
        """
        failed, served, seen = not self.last_reload_successful, self.settings, self._files
        is_due = failed and time.monotonic() >= self._retry_at
        if not (seen.changed() or is_due or (not failed and self._keeps_many_sessions())):
            return None
        try:
            loaded, notes = self._load()
        except (WebConfigError, OSError, RuntimeError) as error:  # out of descriptors, of threads
            self.last_reload_successful = False
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if str(error) != self._reason:
                self._log(f"web configuration not reloaded, the old one stays: {error}")
            self._reason = str(error)
            return None
        if self._stopped.wait(SETTLE_SECONDS) or self._files.changed():
            return None  # the next look sees it whole
        if failed or seen.changed():
            self.settings = loaded
            self._tell([*notes, "reloaded"])
        else:
            self.settings = replace(loaded, refusal=served.refusal)
        self.last_reload_successful = True
        self._reason = ""
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

    def _keeps_many_sessions(self) -> bool:
        tls = self.settings.tls
        return tls is not None and tls.session_stats()["number"] > MOST_SESSIONS

    def _load(self) -> tuple[WebSettings, list[str]]:
        self._files = WebConfigFiles()  # also of a load that fails: its repair must be seen
        return load_web_config(self._path, self._files)

    def _tell(self, notes: list[str]) -> None:
        for note in notes:
            self._log(f"{self._path}: {note}")
