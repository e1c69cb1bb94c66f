# SPDX-License-Identifier: Apache-2.0
"""How long `gpulock history` takes for a million claims, whatever it is asked.

Usage: python tests/bench/history.py [CLAIMS]. The file has the claims of 50 users on 8 GPUs over
two years, a quarter of them with 4 devices, each with its buckets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpulock.daemon.history.record import (
    ClaimedDevice,
    ExporterSamples,
    build_history_record,
    encode_history_record,
)
from gpulock.node.sample import FINISHED_LINE
from gpulock.store.owner import Owner

CLAIMS = 1_000_000
BUDGET = 5.0  # seconds
YEARS = 2 * 365 * 86400.0
SAMPLES = 200  # different records, of which the lines differ in time, user, job and token
CLI = "import sys; from gpulock.cli import main; sys.exit(main())"


def template(folder: Path, number: int) -> bytes:
    """Return the line of a claim with marks where lines differ."""
    devices = tuple(f"0000:{n:02x}:00.0" for n in range(number % 8, number % 8 + 1))
    if number % 4 == 0:
        devices = tuple(f"0000:{n:02x}:00.0" for n in range(4))
    record = Owner(
        scheduler="slurm",
        cluster="main",
        node="gpu01",
        job_id="JOBMARK",
        task_id="",
        user="USERMARK",
        uid=1000,
        queue="gpu" if number % 3 else "short",
        boot_id="b",
        claimed_at=1111111111.111,
        claimed_boottime=1000.0,
        token=f"{number:x}",
        devices=devices,
    )
    since = "since=1000.0 busy=1800.5 observed=3590.25 last_busy=4000.0 energy=123456.75"
    buckets = "width=64.0 used=" + ",".join(["32000"] * 57) + " covered=" + ",".join(["63999"] * 57)
    lines = [f"token {number:x} {d} {since} memory_peak=12345678901 {buckets}" for d in devices]
    text = "\n".join([FINISHED_LINE, "boot_id=b", *lines]) + "\n"
    (folder / "finished" / f"{number:x}").write_text(text)
    end = 2222222222.222
    parts = [ClaimedDevice(device, record, end, "epilog", 3600.0, True) for device in devices]
    line = encode_history_record(build_history_record(parts, ExporterSamples(str(folder)), {}))
    return line.replace(b'"token":"%x"' % number, b'"token":"TOKENMARK"')


def write(path: Path, folder: Path, claims: int) -> None:
    """Write a history."""
    (folder / "finished").mkdir(parents=True)
    lines = [template(folder, number).decode() for number in range(SAMPLES)]
    end = time.time()
    with path.open("w", buffering=1 << 22) as file:
        for number in range(claims):
            at = end - YEARS * (claims - number) / claims
            line = lines[number % SAMPLES]
            line = line.replace("2222222222.222", f"{at:.3f}", 1)
            line = line.replace("1111111111.111", f"{at - 3600:.3f}", 1)
            line = line.replace("USERMARK", f"user{number % 50:02d}", 1)
            line = line.replace("TOKENMARK", f"{number:016x}", 1)
            file.write(line.replace("JOBMARK", str(number), 1))


def main(claims: int) -> int:
    """Measure; return 1 where an answer takes longer than the budget."""
    asked = (
        ("a user's last week", ("--user", "user07", "--since", "7d")),
        ("a user", ("--user", "user07")),
        ("a device", ("--device", "0000:03:00.0")),
        ("a job", ("--job", str(claims // 2))),
        ("all, last 50 and sum", ()),
        ("sums by user", ("--by", "user")),
        ("sums by device", ("--by", "device")),
    )
    with tempfile.TemporaryDirectory(prefix="gpulock-bench-", dir=os.environ.get("TMPDIR")) as name:
        root = Path(name)
        folder = root / "state" / "history"
        folder.mkdir(parents=True)
        path = folder / "history.jsonl"
        write(path, root / "exporter", claims)
        config = root / "gpulock.conf"
        config.write_text(f"STATE_DIR={root}/state\nLOCK_DIR={root}/run\n")
        sys.stdout.write(f"{claims} claims, {path.stat().st_size / 1e6:.0f} MB\n")
        slowest = 0.0
        for what, words in asked:
            command = [sys.executable, "-c", CLI, "--config", str(config), "history", *words]
            begun = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            took = time.perf_counter() - begun
            if done.returncode != 0:
                raise RuntimeError(f"gpulock history exits {done.returncode}: {done.stderr}")
            slowest = max(slowest, took)
            sys.stdout.write(f"  {what:22} {took:6.2f} s\n")
    over = slowest > BUDGET * claims / CLAIMS
    sys.stdout.write(f"  slowest {slowest:.2f} s, budget {BUDGET:.0f} s a million\n")
    return int(over)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else CLAIMS))
