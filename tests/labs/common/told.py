# SPDX-License-Identifier: Apache-2.0
"""An exporter on a node of a lab, as far as a test says what it tells: `sample`, twice a second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final

from gpulock.deadline import clock_boottime
from gpulock.node.sample import SAMPLE_LINE

PLACE: Final = "/run/gpulock-exporter"
PERIOD: Final = 0.5  # seconds
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Told:
    """The figures of each device, by lock id: `x.79=1,100.0`, `memory_used=...`."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._facts = dict.fromkeys(names, "")
        self._over = threading.Event()
        self._turn = threading.Lock()  # else what was true before may be renamed over what is

    def tell(self, name: str, *pairs: str) -> None:
        """Tell this of a device from now on."""
        with self._turn:
            self._facts = {**self._facts, name: " ".join(pairs)}
        self.write()

    def write(self) -> None:
        """Write how things stand, as the exporter does: beside, and renamed in."""
        with self._turn:
            self._write()

    def _write(self) -> None:
        now = clock_boottime()
        head = [SAMPLE_LINE, f"boot_id={BOOT.read_text().strip()}", f"boottime={now}"]
        lines = [
            f"device {name} looked={now} memory_used=0 processes=0 {facts}".rstrip()
            for name, facts in self._facts.items()
        ]
        beside = self._folder / ".sample"
        beside.write_text("\n".join([*head, f"looked={now}", *lines]) + "\n")
        os.rename(beside, self._folder / "sample")

    def go_on(self) -> None:
        """Write until it is over."""
        while not self._over.wait(PERIOD):
            self.write()

    def end(self) -> None:
        """Write no more."""
        self._over.set()


@contextlib.contextmanager
def exporter(folder: Path, names: list[str]) -> Generator[Told]:
    """Let an exporter tell of devices into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    told = Told(folder, names)
    told.write()
    thread = threading.Thread(target=told.go_on)
    thread.start()
    try:
        yield told
    finally:
        told.end()
        thread.join()
        (folder / "sample").unlink()
