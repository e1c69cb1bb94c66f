# SPDX-License-Identifier: Apache-2.0
"""Time `gpulock history` among a million claims of a year: `python -m tests.bench.history`.

Processor time, the least of some runs: what else this machine does counts little. The start of the
interpreter, and of gpulock, is `gpulock --version`.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpulock.daemon.history.files import FOLDER, name_month
from gpulock.daemon.history.record import (
    ClaimedDevice,
    ExporterSamples,
    build_history_record,
    encode_history_record,
)
from gpulock.node.devices import Device
from gpulock.node.sample import SAMPLE_LINE, parse_sample
from tests.bench.harness import Target, count_missed
from tests.support.cli_site import PROGRAM
from tests.support.trees import BOOT, bus, record

ROWS = 1_000_000
YEAR = 365 * 86400.0
KINDS = 200  # claims that differ in all that is read
USERS = 40
PLACES = 1e9, 2e9  # times in a kind's line that each row has its own for
LAST_LIMIT, SUM_LIMIT = 50.0, 5000.0  # ms
RUNS = 5


def make_line(number: int, rng: random.Random) -> bytes:
    """Return the line of a kind of claim, with its buckets."""
    held, devices = rng.uniform(60, 90_000), [bus(n) for n in range(rng.choice((1, 1, 1, 2, 4)))]
    own = record(devices=tuple(devices), user=f"user{number % USERS}", claimed_at=PLACES[0])
    used = ",".join([str(rng.randrange(1000)) for _ in range(40)])
    told = f"busy={held / 2} observed={held} width={held / 40} used={used} covered={used}"
    advice = ExporterSamples("")
    lines = [f"token {own.token} {name} {told} energy=1e5 memory_peak=9" for name in devices]
    advice.last = parse_sample("\n".join([SAMPLE_LINE, f"boot_id={BOOT}", *lines]), SAMPLE_LINE)
    parts = [ClaimedDevice(name, own, PLACES[1], "epilog", held, True) for name in devices]
    known = {name: Device(name, n) for n, name in enumerate(devices)}
    return encode_history_record(build_history_record(parts, advice, known, standing=False))


def write_year(folder: Path, rows: int) -> None:
    """Write the claims of the last year into the files of their months."""
    kinds = [make_line(number, random.Random(number)) for number in range(KINDS)]
    begin = time.time() - YEAR
    lines: dict[str, list[bytes]] = {}
    for number in range(rows):
        at = begin + YEAR * number / rows
        line = kinds[number % KINDS].replace(b"%.1f" % PLACES[1], b"%.3f" % at)
        lines.setdefault(name_month(at), []).append(line)
    for name, some in lines.items():
        (folder / name).write_bytes(b"".join(some))


def processor_ms(*words: str) -> float:
    """Return the least processor time of a command of gpulock, in milliseconds."""
    found: list[float] = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        program = [*PROGRAM, *words]
        subprocess.run(program, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1000 * min(found)


def main() -> int:
    """Print what the commands take, and whether that is within the targets."""
    with tempfile.TemporaryDirectory(prefix="gpulock-bench-") as root:
        config, folder = Path(root, "gpulock.conf"), Path(root, FOLDER)
        folder.mkdir()
        config.write_text(f"STATE_DIR={root}\nLOCK_DIR={root}/lock\nEXPORTER_DIR={root}\n")
        write_year(folder, ROWS)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{ROWS:,} claims of a year, {size >> 20} MiB on {os.cpu_count()} processors")
        start = processor_ms("--version")
        last, total = [
            processor_ms("--config", str(config), "history", *words)
            for words in (("--last", "20"), ("--by", "user"))
        ]
    print(f"ms: start {start:.0f}, --last 20 {last:.0f}, --by user {total:.0f}")
    targets = [
        Target("--last 20 beside the start, ms", last - start, LAST_LIMIT),
        Target("--by user, ms", total, SUM_LIMIT),
    ]
    return 1 if count_missed(targets) else 0


if __name__ == "__main__":
    sys.exit(main())
