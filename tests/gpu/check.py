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
from gpulock.node.devices import Device
from tests.gpu.compare import (
    ASKED,
    Finding,
    Line,
    Round,
    compare_info,
    compare_values,
    kernel_bus,
    parse_cards,
    parse_info,
    parse_single,
)
from tests.support.ports import ReservedPort

ROOT = Path(__file__).resolve().parents[2]
RECORDS, DRIVER = ROOT / "docs/hardware", "/proc/driver/nvidia"
EXPORTER = "from gpulock_exporter.app.program import main; raise SystemExit(main())"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/exporter"}
AGREES, DIFFERS, UNCHECKED = 0, 1, 2
PATIENCE = 60.0  # seconds: a first initialisation of eight cards
TEXT = ("--format=csv,noheader,nounits",)
_SERIALS = re.compile(r"(<(?:serial|board_id|chassis_serial_number)>)[^<]*(</)")
_MIG_UUID = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Scrape = Callable[[], str]


class UncheckedError(Exception):
    """Why nothing can be checked."""


def ask(*words: str) -> str:
    """Ask nvidia-smi; raise UncheckedError with its own words."""
    line = ["nvidia-smi", *words]
    done = subprocess.run(
        line, capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise UncheckedError(f"{' '.join(line)}: {done.stderr or done.stdout}")
    return done.stdout


def known_fields() -> list[str]:
    """Return the fields that this nvidia-smi knows: one other makes it refuse the question."""
    pairs = re.findall(r'^"([^"]+)"(?: or "([^"]+)")?', ask("--help-query-gpu"), re.MULTILINE)
    names = {name for pair in pairs for name in pair}
    return [field for field in ASKED if field in names]


def ask_rows(fields: Sequence[str]) -> dict[str, dict[str, str]]:
    """Ask for fields of all cards; return their text by UUID."""
    columns = ["uuid", *fields]
    rows: dict[str, dict[str, str]] = {}
    for line in ask(f"--query-gpu={','.join(columns)}", *TEXT).splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(columns):
            raise UncheckedError(f"{len(values)} values for {len(columns)} fields: {line!r}")
        rows[values[0]] = dict(zip(columns, values))
    return rows


@contextmanager
def exporter(folder: Path) -> Generator[Scrape]:
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
            while parse_single(text, "gpulock_nvml_up") != 1 or not parse_cards(text):
                if time.monotonic() > end:
                    raise UncheckedError(f"no driver:\n{errors.read_text()}\n{text}")
                time.sleep(0.2)
                with suppress(OSError):  # it does not listen yet
                    text = scrape()
            yield scrape
        finally:
            process.terminate()
            process.communicate()


def ask_both(scrape: Scrape, fields: Sequence[str], seconds: float) -> list[Round]:
    """Ask the exporter, nvidia-smi and the exporter again, once a second."""
    rounds: list[Round] = []
    began = time.monotonic()
    while not rounds or time.monotonic() - began < seconds:
        due = time.monotonic() + 1
        before, rows, text = parse_cards(scrape()), ask_rows(fields), scrape()
        at = parse_single(text, "gpulock_sample_timestamp_seconds") or time.time()
        rounds.append(Round(at, before, rows, parse_cards(text)))
        time.sleep(max(0.0, due - time.monotonic()))
    return rounds


def raw_nvml() -> str:
    """Return what NVML itself answers, in a process of its own for a call that hangs."""
    program = [sys.executable, "-m", "tests.gpu.raw"]
    done = subprocess.run(
        program, env=ENV, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise UncheckedError(f"NVML does not answer here: {done.stderr}")
    return done.stdout


def compare_devices(devices: Sequence[Device], cards: Sequence[Any]) -> list[str]:
    """Say where /proc, as gpulock reads it, differs from NVML's devices and their order."""
    wrong = [f"/proc has {len(devices)} GPUs, NVML {len(cards)}"] * (len(devices) != len(cards))
    for device, card in zip(devices, cards):
        identity = card["identity"]
        for what, ours, theirs in (
            ("bus id", device.bus, kernel_bus(identity["bus_id"])),
            ("minor", device.minor, identity["minor"]),
            ("UUID", device.uuid, identity["uuid"]),
        ):
            if ours != theirs:
                wrong.append(f"GPU {device.index}: {what} is {ours} in /proc, {theirs} in NVML")
    return wrong


def masked(text: str, uuids: Sequence[str], host: str) -> str:
    """Return text that names no machine, each card still told from others."""
    text = _SERIALS.sub(r"\g<1>0\g<2>", text)
    for number, uuid in enumerate([*uuids, *sorted(set(_MIG_UUID.findall(text)))]):
        text = text.replace(uuid, f"{uuid[:4]}00000000-0000-0000-0000-{number:012d}")
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "node", text)


def write_record(folder: Path, rows: dict[str, dict[str, str]], parts: dict[str, object]) -> Path:
    """Write what was said and found; return the path."""
    first = next(iter(rows.values()))
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    model = re.sub(r"[^a-z0-9]+", "-", first.get("name", "gpu").lower()).strip("-")
    path = folder / f"{date}-{model}-{first.get('driver_version', 'unknown')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(masked(json.dumps(parts, indent=1) + "\n", [*rows], os.uname().nodename))
    return path


def check(seconds: float, folder: Path) -> int:
    """Check; return the exit code; raise UncheckedError."""
    fields = known_fields()
    with exporter(folder) as scrape:
        rounds = ask_both(scrape, fields, seconds)
        text, xml, nvml = scrape(), ask("-q", "-x"), json.loads(raw_nvml())
    rows = {uuid: dict(row) for uuid, row in rounds[-1].rows.items()}
    lines = [*compare_info(parse_info(text), rows), *compare_values(rounds, fields)]
    proc = read_devices(DRIVER, "/sys")
    wrong = [*compare_devices(proc, nvml["cards"]), *(say(line) for line in lines if bad(line))]
    found = {kind.value: [say(line) for line in lines if line.finding is kind] for kind in Finding}
    said = {"kernel": os.uname().release, "differs": wrong, "compared": found}
    raw = {"nvml": nvml, "nvidia-smi": rows, "metrics": text.splitlines(), "xml": xml.splitlines()}
    print(*(f"DIFFERS  {word}" for word in wrong), sep="\n")
    print(f"written: {write_record(RECORDS, rows, {**said, **raw})}")
    print(f"gpu-check: {'FAILED' if wrong else 'all agree'}")
    return DIFFERS if wrong else AGREES


def bad(line: Line) -> bool:
    """Return whether something differs."""
    return line.finding is Finding.DIFFERED


def say(line: Line) -> str:
    """Return a comparison in words."""
    return f"{line.uuid}  {line.metric}: {line.words}"


def main() -> int:
    """Check this machine; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    try:
        if not list(Path(DRIVER, "gpus").glob("*/information")):
            raise UncheckedError(f"no NVIDIA GPU here ({DRIVER}/gpus is empty)")
        with tempfile.TemporaryDirectory(prefix="gpulock-gpu-check-") as folder:
            return check(options.seconds, Path(folder))
    except (UncheckedError, OSError, subprocess.TimeoutExpired) as fault:
        print(f"gpu-check: nothing was checked: {fault}")
        return UNCHECKED


if __name__ == "__main__":
    sys.exit(main())
