# SPDX-License-Identifier: Apache-2.0
"""A web configuration that is read again when it, or a certificate, changes.

A thread of its own looks. A change that does not load changes nothing, is tried again at each look,
and `last_reload_successful` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig.config import WebConfigFiles, load_web_config

LOOK_SECONDS = 2.0
SETTLE_SECONDS = 0.2  # a file that is written in its place is empty first: no TLS and no passwords


class Reloader:
    """Keep a server's settings those of a file; the first load is the caller's to survive."""

    def __init__(self, path: str, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._stopped = threading.Event()
        self._fault = ""  # why the last load failed
        self._files = WebConfigFiles()  # of what is served
        self.settings, warning = load_web_config(path, self._files)
        self._say(warning)

    @property
    def last_reload_successful(self) -> bool:
        """Tell whether what is served is the file as it is now."""
        return not self._fault

    def look(self) -> WebSettings | None:
        """Return new settings when a file has changed and all of it loads, else None."""
        if not (self._fault or self._files.changed()):
            return None
        files = WebConfigFiles()
        try:
            secured = bool(self.settings.tls or self.settings.refusal)
            loaded, warning = load_web_config(self._path, files, secured)
        except Exception as error:  # also out of descriptors: whatever it is, the thread looks on
            if str(error) != self._fault:
                self._log(f"web configuration not reloaded, the old one stays: {error}")
            self._fault = str(error)
            return None
        if self._stopped.wait(SETTLE_SECONDS) or files.changed():
            return None  # the next look sees it whole
        self._say(warning)
        self._say("reloaded")
        self.settings, self._files, self._fault = loaded, files, ""
        return loaded

    def start(self, adopt: Callable[[WebSettings], None], seconds: float = LOOK_SECONDS) -> None:
        """Look every so often, and hand new settings to `adopt`, until `stop`."""

        def watch() -> None:
            while not self._stopped.wait(seconds):
                settings = self.look()
                if settings is not None:
                    adopt(settings)

        threading.Thread(target=watch, name="web-config", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _say(self, words: str) -> None:
        if words:
            self._log(f"{self._path}: {words}")
