# SPDX-License-Identifier: Apache-2.0
"""Compare the exporter with nvidia-smi on real GPUs while a load runs: `make gpu-check`.

README.md beside this says how. 0: all agrees; 1: something differs; 2: it could not be checked,
or not under a load.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpulock.node.devices import Device, read_devices
from tests.gpu import record
from tests.gpu.compare import (
    QUIET,
    Finding,
    Round,
    judge,
    kernel_bus,
    parse_cards,
    parse_single,
)
from tests.gpu.rules import ASKED
from tests.gpu.smi import Smi, SmiError
from tests.support.ports import ReservedPort

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXPORTER = "from gpulock_exporter.app.program import main; raise SystemExit(main())"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/exporter"}
AGREES, DIFFERS, UNCHECKED = 0, 1, 2
PATIENCE = 60.0  # seconds: a first initialisation of eight cards
UNSETTLED = 3.0  # seconds after a change of the load that are not judged
PHASES = {QUIET: 0.0, "full load": 1.0, "half load": 0.5}  # share of the time
HOW_TO_LOAD = (
    "give a load of your own: --load 'PROGRAM --gpu {index} --for {seconds}'; it prints the line "
    "`running` once the GPU is at work, and keeps it so for a {share} of the time"
)


class Failed(Exception):
    """Say why nothing can be checked, and what to do."""


class Result(NamedTuple):
    """The rounds, the raw answers by the name of their file, why there was no load."""

    rounds: list[Round]
    raw: dict[str, str]
    no_load: str


Scrape = Callable[[], str]


@contextmanager
def exporter(folder: Path, base: Path | None) -> Generator[Scrape]:
    """Run the real exporter on this machine's driver; give what scrapes it.

    It has a folder of its own, and listens on loopback. Raises Failed where it cannot be scraped.
    """
    errors, config = folder / "exporter.stderr", folder / "gpulock.conf"
    own = {"LOCK_DIR": f"{folder}/locks", "STATE_DIR": f"{folder}/state", "PROCESS_PERIOD": "1"}
    given = base.read_text().splitlines() if base else []
    kept = [line for line in given if line.partition("=")[0] not in {"SIMULATION", *own}]
    config.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in own.items())]) + "\n")
    words = ["--config", str(config), "--folder", f"{folder}/exporter"]
    with ReservedPort() as port, errors.open("wb") as log:
        program = [sys.executable, "-c", EXPORTER, *words, "--listen", port.address]
        process = subprocess.Popen(program, env=ENV, stderr=log)

        def scrape() -> str:
            if process.poll() is not None:
                raise Failed(f"the exporter ended: {errors.read_text()}")
            with urllib.request.urlopen(f"http://{port.address}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        try:
            end, text = time.monotonic() + PATIENCE, ""
            while parse_single(text, "gpulock_nvml_up") != 1 or not parse_cards(text):
                if time.monotonic() > end:
                    raise Failed(f"the exporter hears no driver:\n{errors.read_text()}\n{text}")
                time.sleep(0.2)
                with suppress(OSError):  # it does not listen yet
                    text = scrape()
            yield scrape
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def loaded(command: str, cards: int, share: float, seconds: float) -> Generator[str]:
    """Load every card for a phase; give why it cannot be, empty where it can."""
    started: list[subprocess.Popen[str]] = []
    for index in range(cards if share else 0):
        words = shlex.split(command.format(index=index, share=share, seconds=f"{seconds:.0f}"))
        out, error = subprocess.PIPE, subprocess.STDOUT
        started.append(
            subprocess.Popen(words, stdout=out, stderr=error, text=True, start_new_session=True)
        )
    try:
        said = [one.stdout.readline() if one.stdout else "" for one in started]
        yield next((line.strip() or "no word" for line in said if line != "running\n"), "")
    finally:
        for one in started:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # all that it started, too
            one.communicate()


def play(scrape: Scrape, smi: Smi, fields: Sequence[str], load: str, seconds: float) -> Result:
    """Go through the phases; raise Failed or SmiError.

    Of each round both are asked, the exporter before and after. A counter stands where it stood at
    the exporter's sample.
    """
    result = Result([], {}, "" if load else "no load was wanted")
    cards = len(smi.ask(("index",)))
    for phase, share in PHASES.items():
        if share and not load:
            continue
        # it must outlast the rounds, whatever nvidia-smi takes
        with loaded(load, cards, share, 3 * seconds + PATIENCE) as fault:
            if fault:
                return result._replace(no_load=fault)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                due = time.monotonic() + 1
                before = parse_cards(scrape())
                settled, rows = time.monotonic() - began > UNSETTLED, smi.ask(fields)
                text = scrape()
                at = parse_single(text, "gpulock_sample_timestamp_seconds") or time.time()
                one = Round(at, phase, settled, before, rows, parse_cards(text))
                result.rounds.append(one)
                time.sleep(max(0.0, due - time.monotonic()))
            name = phase.replace(" ", "-")
            result.raw[f"{name}.xml"] = smi.run("-q", "-x")
            result.raw[f"{name}.metrics"] = scrape()
            result.raw[f"{name}.json"] = json.dumps(result.rounds[-1].rows, indent=1)
    return result


def raw_nvml() -> str:
    """Return what NVML itself answers, in a process of its own for a call that hangs."""
    program = [sys.executable, "-m", "tests.gpu.raw"]
    done = subprocess.run(
        program, env=ENV, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise Failed(f"NVML does not answer here: {done.stderr}")
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


def check(options: argparse.Namespace, folder: Path) -> int:
    """Check; return the exit code; raise Failed or SmiError."""
    smi = Smi(options.nvidia_smi)
    fields = smi.known(ASKED)
    if "index" not in fields:
        raise Failed(f"{options.nvidia_smi} --help-query-gpu names no field that is known here")
    load = "" if options.no_load else options.load
    with exporter(folder, options.config) as scrape:
        result = play(scrape, smi, fields, load, options.seconds)
    nvml = raw_nvml()
    lines = judge(result.rounds, fields)
    wrong = compare_devices(read_devices(options.driver_root, "/sys"), json.loads(nvml)["cards"])
    rows = list(result.rounds[-1].rows.values())
    uuids = [row["uuid"] for row in rows]
    about = record.About(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        model=rows[0].get("name", "GPU"),
        driver=rows[0].get("driver_version", "unknown"),
        how=f"{len(rows)} card(s), kernel {os.uname().release}; {len(result.rounds)} rounds in "
        f"{result.rounds[-1].at - result.rounds[0].at:.0f} s; "
        f"load: {result.no_load or load}.",
        uuids=uuids,
        host=os.uname().nodename,
    )
    text = record.page(about, lines, wrong)
    print(*(f"DIFFERS  {word}" for word in wrong), sep="\n")
    for line in lines:
        if line.finding is Finding.DIFFERED:
            where = record.place(line.uuid, uuids)
            print(f"DIFFERS  card {where}  {line.metric}: {line.words}")
    print(f"written: {record.write(options.out, about, text, {**result.raw, 'nvml.json': nvml})}")
    if wrong or any(line.finding is Finding.DIFFERED for line in lines):
        print("gpu-check: FAILED: the exporter and nvidia-smi differ")
        return DIFFERS
    if result.no_load:
        print(f"gpu-check: idle only: {result.no_load}\n{HOW_TO_LOAD}")
        return UNCHECKED
    print("gpu-check: the exporter, /proc, NVML and nvidia-smi agree")
    return AGREES


def main() -> int:
    """Check this machine; return the exit code."""
    own_load = f"{sys.executable} {HERE / 'load.py'} {{index}} {{share}} {{seconds}}"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvidia-smi", default="nvidia-smi", help="the program to compare with")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of three phases")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/hardware")
    parser.add_argument("--driver-root", default="/proc/driver/nvidia")
    parser.add_argument("--config", type=Path, help="a gpulock.conf to begin with")
    parser.add_argument("--load", default=own_load, help=HOW_TO_LOAD)
    parser.add_argument("--no-load", action="store_true", help="compare an idle machine only")
    options = parser.parse_args()
    if not list(Path(options.driver_root, "gpus").glob("*/information")):
        place = f"{options.driver_root}/gpus"
        print(f"gpu-check: no NVIDIA GPU here ({place} is missing or empty): nothing was checked.")
        return UNCHECKED
    try:
        with tempfile.TemporaryDirectory(prefix="gpulock-gpu-check-") as folder:
            return check(options, Path(folder))
    except (Failed, SmiError, OSError) as fault:
        print(f"gpu-check: nothing was checked: {fault}")
        return UNCHECKED


if __name__ == "__main__":
    sys.exit(main())
