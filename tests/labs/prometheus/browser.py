# SPDX-License-Identifier: Apache-2.0
"""Chromium without a window, driven through the pipe of its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/ : JSON messages, each ended by a NUL, on the
descriptors 3 (to it) and 4 (from it). Debian's package is installed where it is missing.
"""

from __future__ import annotations

import base64
import json
import os
import select
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.wait import wait_until

PROGRAM = "/usr/bin/chromium"
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class BrowserError(Exception):
    """Say what Chromium did not do."""


class Picture(NamedTuple):
    """A screenshot: 8 bit RGB, row by row."""

    width: int
    height: int
    pixels: bytes

    def at(self, x: int, y: int) -> tuple[int, int, int]:
        """Return the colour of a pixel."""
        start = 3 * (y * self.width + x)
        red, green, blue = self.pixels[start : start + 3]
        return red, green, blue

    def colours(self) -> int:
        """Return how many colours there are: few on a page that is blank."""
        return len({self.pixels[n : n + 3] for n in range(0, len(self.pixels), 3)})

    def brightness(self) -> float:
        """Return the mean of all pixels, from 0 black to 1 white."""
        return sum(self.pixels) / len(self.pixels) / 255


class Browser:
    """A Chromium with one page; each act waits until it is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._rest = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={self._folder}/profile", "about:blank"]
        own, self._write = os.pipe()
        self._read, theirs = os.pipe()

        def descriptors() -> None:
            os.dup2(os.dup(own), 103)
            os.dup2(os.dup(theirs), 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        self._log = (self._folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            close_fds=False,
            preexec_fn=descriptors,  # noqa: PLW1509 (one thread at this time)
            start_new_session=True,
        )
        os.close(own)
        os.close(theirs)
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        found = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")
        self.do("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def show(self, url: str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Open a page in a window of that size, by a reader who likes it light or dark."""
        self._open("about:blank")  # or the page before this one may load itself again meanwhile
        self.events.clear()
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self._open(url)

    def _open(self, url: str) -> None:
        """Go to an address, and wait until what is there, and not what was before, has loaded."""
        loader = self.do("Page.navigate", url=url)["loaderId"]
        while not any(loaded(one, loader) for one in self.events):
            self.events.append(self._next())

    def value(self, script: str) -> Any:
        """Return what an expression is on the page."""
        answer = self.do("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, path: Path) -> Picture:
        """Leave a picture of the whole page at `path` for people; return one at a quarter's size.

        A whole one would take seconds to unpack.
        """
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        whole = {key: size[key] for key in ("x", "y", "width", "height")}
        path.write_bytes(self._captured({**whole, "scale": 1}))
        return read_png(self._captured({**whole, "scale": 0.25}))

    def _captured(self, clip: dict[str, float]) -> bytes:
        answer = self.do(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        return base64.b64decode(answer["data"])

    def fetched(self) -> list[str]:
        """Return what the page asked for since it was opened."""
        return [
            str(one["params"]["request"]["url"])
            for one in self.events
            if one.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return what the browser says against the page: what the policy refused, and errors."""
        return [
            str(one["params"]["entry"]["text"])
            for one in self.events
            if one.get("method") == "Log.entryAdded"
        ]

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Let it do something; return its answer; raise BrowserError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") != self._number:
                self.events.append(found)
            elif "error" in found:
                raise BrowserError(f"{method}: {found['error']}")
            else:
                answer: dict[str, Any] = found["result"]
                return answer

    def wait(self, method: str) -> None:
        """Wait for an event that may have come already."""
        while not any(one.get("method") == method for one in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            wait_until(self._can_read, why=lambda: f"Chromium to answer\n{self._said()}")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"Chromium has ended: {self._said()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _can_read(self) -> bool:
        return bool(select.select([self._read], [], [], 0.2)[0])

    def _said(self) -> str:
        return (self._folder / "chromium.log").read_text(errors="replace")[-2000:]


def loaded(event: dict[str, Any], loader: str) -> bool:
    """Return whether an event says that the document of a loader has loaded."""
    found = event.get("params", {})
    return (
        event.get("method") == "Page.lifecycleEvent"
        and found["name"] == "load"
        and found["loaderId"] == loader
    )


def read_png(data: bytes) -> Picture:
    """Return the pixels of a PNG of 8 bits a channel, not interlaced, with alpha or without."""
    place, packed = 8, b""
    width = height = channels = 0
    while place < len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        body = data[place + 8 : place + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            channels = {2: 3, 6: 4}[colour]
            assert (depth, interlaced) == (8, 0)
        elif kind == b"IDAT":
            packed += body
        place += size + 12
    rows = _unfiltered(zlib.decompress(packed), width * channels, height, channels)
    if channels == 4:
        rows = b"".join(rows[n : n + 3] for n in range(0, len(rows), 4))
    return Picture(width, height, rows)


def _unfiltered(raw: bytes, stride: int, height: int, step: int) -> bytes:
    """Undo the filters of the rows (PNG specification, section 9)."""
    found = bytearray()
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        kind, line = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for n in range(stride) if kind else ():
            left = line[n - step] if n >= step else 0
            corner = before[n - step] if n >= step else 0
            guess = (left, before[n], (left + before[n]) // 2, _paeth(left, before[n], corner))
            line[n] = (line[n] + guess[kind - 1]) & 0xFF
        found += line
        before = line
    return bytes(found)


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    return min((left, above, corner), key=lambda one: abs(estimate - one))
