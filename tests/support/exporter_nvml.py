# SPDX-License-Identifier: Apache-2.0
"""The NVML source in a process of its own, on the double: a library that is loaded stays.

Run as a program it obeys lines of JSON on its standard input: open, look, advance, close.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulock_exporter.frame import DeviceTelemetry, Frame, decode_frame, encode_frame
from gpulock_exporter.nvml.source import NvmlSource

if TYPE_CHECKING:
    from tests.nvml.double import Double

ROOT = Path(__file__).resolve().parents[2]
STOPPED_AT = 1000.0  # seconds since the boot
PATIENCE = 20.0  # seconds for an answer on a machine that is busy


class Eye:
    """What looks at a double. Its clock can be set forward.

    `binding` is a folder with another nvidia-ml-py than that of this environment. A clock that is
    `stopped` goes forward by what it is set alone, however busy the machine is.
    """

    def __init__(self, nvml: Double, binding: Path | None = None, *, stopped: bool = False) -> None:
        path = os.pathsep.join(str(one) for one in (binding, ROOT, ROOT / "exporter") if one)
        self._process = subprocess.Popen(
            [sys.executable, __file__, f"{nvml.node}/sys", *(["stopped"] if stopped else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **nvml.env, "PYTHONPATH": path},
        )

    def __enter__(self) -> Eye:
        try:
            self.open()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def open(self) -> None:
        """Open the source; raise RuntimeError with its words."""
        self._order("open")

    def look(self, *, processes: bool = False, after: float = 1.0) -> Frame:
        """Look, `after` so many seconds of its clock; raise RuntimeError with its words."""
        self._order("advance", after)
        return decode_frame(self._order("look", [processes]))

    def close(self) -> None:
        """Close the source."""
        self._order("close")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _order(self, what: str, value: float | list[object] = 0) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, value]).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        if not ready:
            raise TimeoutError(what)
        line = self._process.stdout.readline()
        answer: Any = json.loads(line)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return line


def device(frame: Frame, index: int = 0) -> DeviceTelemetry:
    """Return a card of a frame by its index."""
    found = [one for one in frame.devices if one.index == index and one.gi is None]
    assert len(found) == 1, frame.failures
    return found[0]


def main(argv: list[str]) -> int:
    """Obey; an answer is a frame, null, or the words of a RuntimeError."""
    ahead = 0.0
    stopped = "stopped" in argv[2:]

    def clock() -> float:
        return (STOPPED_AT if stopped else time.clock_gettime(time.CLOCK_BOOTTIME)) + ahead

    source = NvmlSource(clock, argv[1])
    for line in sys.stdin:
        what, value = json.loads(line)
        answer = b"null\n"
        try:
            if what == "advance":
                ahead += value
            elif what == "look":
                answer = encode_frame(source.collect(*value))
            else:
                getattr(source, what)()
        except RuntimeError as fault:
            answer = json.dumps(str(fault)).encode() + b"\n"
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
