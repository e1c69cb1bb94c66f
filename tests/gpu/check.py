# SPDX-License-Identifier: Apache-2.0
"""Compare the exporter with nvidia-smi on real GPUs: `make gpu-check`. README.md says how.

0: all agrees; 1: something differs; 2: it could not be checked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpulock.node.device_list import read_devices
from tests.gpu.compare import ASKED, compare_dump, read_scrape, read_single
from tests.support.ports import ReservedPort

ROOT = Path(__file__).resolve().parents[2]
RECORDS, DRIVER = ROOT / "docs/hardware", "/proc/driver/nvidia"
EXPORTER = "from gpulock_exporter.app.program import main; raise SystemExit(main())"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/exporter"}
UNCHECKED = 2  # exit code
PATIENCE = 60.0  # seconds: a first initialisation of eight cards
PERIOD = 2.0  # seconds between two rounds
TEXT = ("--format=csv,noheader,nounits",)
_SERIALS = re.compile(r"(<(?:serial|board_id|chassis_serial_number)>)[^<]*(</)")
_MIG_UUID = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Rows = dict[str, dict[str, str]]  # the text of each field of nvidia-smi, by UUID


class UncheckedError(Exception):
    """Why nothing can be checked."""


def ask(*words: str) -> str:
    """Return what a program prints; raise UncheckedError with its own words."""
    done = subprocess.run(
        words,
        env=ENV,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise UncheckedError(f"{' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout


def known_fields() -> list[str]:
    """Return the fields that this nvidia-smi knows: one other makes it refuse the question."""
    listed = ask("nvidia-smi", "--help-query-gpu")
    pairs = re.findall(r'^"([^"]+)"(?: or "([^"]+)")?', listed, re.MULTILINE)
    names = {name for pair in pairs for name in pair}
    return [field for field in ASKED if field in names]


def ask_rows(fields: Sequence[str]) -> Rows:
    """Ask for fields of all cards."""
    columns = ["uuid", *fields]
    rows: Rows = {}
    for line in ask("nvidia-smi", f"--query-gpu={','.join(columns)}", *TEXT).splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(columns):
            raise UncheckedError(f"{len(values)} values for {len(columns)} fields: {line!r}")
        rows[values[0]] = dict(zip(columns, values))
    return rows


@contextmanager
def exporter(folder: Path) -> Generator[Callable[[], str]]:
    """Run the real exporter on this machine's driver; give what scrapes it.

    It has a folder of its own, and listens on loopback. Raises UncheckedError where it has no card.
    """
    errors, config = folder / "exporter.stderr", folder / "gpulock.conf"
    own = {"LOCK_DIR": f"{folder}/locks", "STATE_DIR": f"{folder}/state", "SAMPLE_PERIOD": "0.5"}
    config.write_text("".join(f"{key}={value}\n" for key, value in own.items()))
    words = ["--config", str(config), "--folder", f"{folder}/exporter"]
    with ReservedPort() as port, errors.open("wb") as log:
        program = [sys.executable, "-c", EXPORTER, *words, "--listen", port.address]
        process = subprocess.Popen(program, env=ENV, stderr=log)

        def scrape() -> str:
            if process.poll() is not None:
                raise UncheckedError(f"the exporter ended: {errors.read_text()}")
            with urllib.request.urlopen(f"http://{port.address}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        try:
            end, text = time.monotonic() + PATIENCE, ""
            while read_single(text, "gpulock_nvml_up") != 1 or not read_scrape(text)[0]:
                if time.monotonic() > end:
                    raise UncheckedError(f"no driver:\n{errors.read_text()}\n{text}")
                time.sleep(0.2)
                with suppress(OSError):  # it does not listen yet
                    text = scrape()
            yield scrape
        finally:
            process.terminate()
            process.communicate()


def take_dump(seconds: float, folder: Path) -> dict[str, Any]:
    """Return what exporter, nvidia-smi, NVML and /proc say; raise UncheckedError."""
    fields, rounds, began = known_fields(), list[dict[str, Any]](), time.monotonic()
    with exporter(folder) as scrape:
        while len(rounds) < 2 or time.monotonic() - began < seconds:
            time.sleep(PERIOD)
            rounds.append({"nvidia-smi": ask_rows(fields), "metrics": scrape().splitlines()})
    proc = read_devices(DRIVER, "/sys")
    return {
        "kernel": os.uname().release,
        "proc": [{"bus_id": one.bus, "minor": one.minor, "uuid": one.uuid} for one in proc],
        "rounds": rounds,
        # in a process of its own, for a call that hangs
        "nvml": json.loads(ask(sys.executable, "-m", "tests.gpu.raw")),
        "xml": ask("nvidia-smi", "-q", "-x").splitlines(),
    }


def masked(text: str, uuids: Sequence[str], host: str) -> str:
    """Return text that names no machine, each card still told from others."""
    text = _SERIALS.sub(r"\g<1>0\g<2>", text)
    for number, uuid in enumerate([*uuids, *sorted(set(_MIG_UUID.findall(text)))]):
        text = text.replace(uuid, f"{uuid[:4]}00000000-0000-0000-0000-{number:012d}")
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "node", text)


def write_record(dump: dict[str, Any]) -> Path:
    """Write a dump to be sent in; return the path."""
    rows: Rows = dump["rounds"][-1]["nvidia-smi"]
    first = next(iter(rows.values()))
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    model = re.sub(r"[^a-z0-9]+", "-", first.get("name", "gpu").lower()).strip("-")
    path = RECORDS / f"{date}-{model}-{first.get('driver_version', 'unknown')}.json"
    path.write_text(masked(json.dumps(dump, indent=1) + "\n", [*rows], os.uname().nodename))
    return path


def main() -> int:
    """Check this machine; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    try:
        if not list(Path(DRIVER, "gpus").glob("*/information")):
            raise UncheckedError(f"no NVIDIA GPU here ({DRIVER}/gpus is empty)")
        with tempfile.TemporaryDirectory(prefix="gpulock-gpu-check-") as folder:
            dump = take_dump(options.seconds, Path(folder))
    except (UncheckedError, OSError, subprocess.TimeoutExpired) as fault:
        print(f"gpu-check: nothing was checked: {fault}")
        return UNCHECKED
    wrong = compare_dump(dump)
    print(*(f"DIFFERS  {line}" for line in wrong), sep="\n")
    print(f"written: {write_record({**dump, 'differs': wrong})}")
    print(f"gpu-check: {'FAILED' if wrong else 'all agree'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
