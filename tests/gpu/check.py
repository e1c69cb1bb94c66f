# SPDX-License-Identifier: Apache-2.0
"""Compare the exporter with nvidia-smi on real GPUs while a load runs: `make gpu-check`.

README.md beside this says how. 0: all agrees; 1: something differs; 2: it could not be checked,
or not under a load.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from tests.gpu import check_devices, control, instances, record  # noqa: E402 (the checkout is put on the path first)
from tests.gpu.compare import QUIET, Finding, Line, Round, judge  # noqa: E402
from tests.gpu.rules import EVERY  # noqa: E402
from tests.gpu.scraped import Card, parse_cards, single  # noqa: E402
from tests.gpu.smi import Smi, SmiError  # noqa: E402
from tests.support.ports import ReservedPort  # noqa: E402

HERE = Path(__file__).resolve().parent
EXPORTER = "from gpulock_exporter.app.program import main; raise SystemExit(main())"
AGREES, DIFFERS, UNCHECKED = 0, 1, 2
PATIENCE = 60.0  # seconds: a first initialisation of eight cards, or a compiler's
UNSETTLED = 3.0  # seconds after a change of the load that are not judged
PERIOD = 1.0
ENDING = 15.0  # seconds for a load to end: a kernel is waited for
PHASES = ((QUIET, 0.0), ("full load", 1.0), ("half load", 0.5))


class Phase(NamedTuple):
    """What was under way, and its share of the time; 0 is nothing."""

    name: str
    share: float


class Failed(Exception):
    """Say why nothing can be checked, and what to do."""


class Exporter:
    """The real exporter on this machine's driver, in a folder of its own, on loopback."""

    def __init__(self, folder: Path, base: Path | None) -> None:
        self._errors = folder / "exporter.stderr"
        config = folder / "gpulock.conf"
        own = {
            "LOCK_DIR": f"{folder}/locks",
            "STATE_DIR": f"{folder}/state",
            "PROCESS_PERIOD": "1",
        }
        given = base.read_text().splitlines() if base else []
        kept = [line for line in given if line.partition("=")[0] not in {"SIMULATION", *own}]
        config.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in own.items())]) + "\n")
        self._port = ReservedPort()
        self._url = f"http://{self._port.address}/metrics"
        words = ["--config", str(config), "--folder", f"{folder}/exporter"]
        path = os.pathsep.join((str(ROOT), str(ROOT / "exporter"), *sys.path[2:]))
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", EXPORTER, *words, "--listen", self._port.address],
                env={**os.environ, "PYTHONPATH": path},
                stderr=errors,
            )

    def scrape(self) -> str:
        """Return the metrics; raise Failed where it has ended."""
        if self._process.poll() is not None:
            raise Failed(f"the exporter ended: {self._errors.read_text()}")
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        """Wait until the driver is heard and its samples are; raise Failed."""
        end = time.monotonic() + PATIENCE
        text = ""
        while time.monotonic() < end:
            try:
                text = self.scrape()
            except OSError:
                text = ""  # not yet
            if single(text, "gpulock_nvml_up") == 1 and parse_cards(text):
                return
            time.sleep(0.2)
        raise Failed(f"the exporter does not hear the driver:\n{self._errors.read_text()}\n{text}")

    def end(self) -> None:
        """End it."""
        self._port.release()
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def loaded(command: str, cards: int, phase: Phase, seconds: float) -> Generator[str]:
    """Load every card for a phase; give why it cannot be, empty where it can."""
    if not phase.share:
        yield ""
        return
    started: list[subprocess.Popen[str]] = []
    try:
        for index in range(cards):
            words = command.format(index=index, share=phase.share, seconds=f"{seconds:.0f}")
            started.append(
                subprocess.Popen(
                    shlex.split(words),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # what it starts ends with it
                )
            )
        yield next((fault for one in started if (fault := first_word(one))), "")
    finally:
        for one in started:
            end(one)


def first_word(process: subprocess.Popen[str]) -> str:
    """Wait for `running`; return what it said instead."""
    said = process.stdout.readline() if process.stdout else ""
    if said.strip() == "running":
        return ""
    return " ".join((said + end(process)).split()) or "it ended without a word"


def end(process: subprocess.Popen[str]) -> str:
    """End a load and all that it started; return what it complained of."""
    if process.returncode is not None:
        return ""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=ENDING)[1]
    return ""


def look(exporter: Exporter, smi: Smi, fields: Sequence[str], phase: Phase, began: float) -> Round:
    """Ask both, us before and after. A counter stands where it stood at the exporter's sample."""
    before: Mapping[str, Card] = parse_cards(exporter.scrape())
    settled, told = time.monotonic() - began > UNSETTLED, smi.ask(fields)
    text = exporter.scrape()
    at = single(text, "gpulock_sample_timestamp_seconds") or time.time()
    return Round(at, phase.name, settled, before, told, parse_cards(text))


class Result(NamedTuple):
    """The rounds, the raw answers by the name of their file, why there was no load."""

    rounds: list[Round]
    raw: dict[str, str]
    fault: str


def play(exporter: Exporter, smi: Smi, fields: Sequence[str], load: str, seconds: float) -> Result:
    """Go through the phases; raise Failed or SmiError."""
    result = Result([], {}, "")
    cards = len(smi.ask(("index",)).fields)
    for phase in (Phase(*one) for one in PHASES):
        if phase.share and not load:
            continue
        # it must outlast the rounds, whatever nvidia-smi takes
        with loaded(load, cards, phase, 3 * seconds + PATIENCE) as fault:
            if fault:
                return result._replace(fault=fault)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                due = time.monotonic() + PERIOD
                result.rounds.append(look(exporter, smi, fields, phase, began))
                time.sleep(max(0.0, due - time.monotonic()))
            name = phase.name.replace(" ", "-")
            result.raw[f"{name}.xml"] = smi.run("-q", "-x")
            result.raw[f"{name}.metrics"] = exporter.scrape()
            result.raw[f"{name}.csv"] = csv_of(result.rounds[-1], fields)
    return result


def csv_of(one: Round, fields: Sequence[str]) -> str:
    """Return what nvidia-smi said in a round, a line a field."""
    rows = one.told.fields.values()
    return "".join(f"{field}: {', '.join(row[field] for row in rows)}\n" for field in fields)


def raw_nvml() -> str:
    """Return what NVML itself answers, or why it did not."""
    done = subprocess.run(
        [sys.executable, str(HERE / "raw.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"


def about(result: Result, options: argparse.Namespace, extra: Sequence[str]) -> record.About:
    """Return what was checked."""
    last = result.rounds[-1]
    rows = list(last.told.fields.values())
    load = "none" if result.fault or options.no_load else options.load or "tests/gpu/load.py"
    return record.About(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        model=rows[0].get("name", "GPU"),
        driver=rows[0].get("driver_version", "unknown"),
        cards=len(rows),
        kernel=os.uname().release,
        seconds=last.at - result.rounds[0].at,
        rounds=len(result.rounds),
        load=load,
        remarks=[*extra, *([f"no load could be started: {result.fault}"] if result.fault else [])],
    )


def report(lines: Sequence[Line], uuids: Sequence[str]) -> None:
    """Print what differs in full, and how many agree."""
    for line in lines:
        card = record.place(line.uuid, uuids)
        if line.finding is Finding.DIFFERED:
            print(f"DIFFERS  card {card}  {line.metric}: {line.words}")
    for finding in Finding:
        count = sum(line.finding is finding for line in lines)
        print(f"{count:6}  {finding.value}")


def check(options: argparse.Namespace, folder: Path) -> int:
    """Check; return the exit code; raise Failed or SmiError."""
    smi = Smi(options.nvidia_smi)
    fields = smi.known(EVERY)
    if "index" not in fields:
        raise Failed(f"{options.nvidia_smi} --help-query-gpu names no field that is known here")
    command = options.load or f"{sys.executable} {HERE / 'load.py'} {{index}} " + (
        "--share {share} --seconds {seconds}"
    )
    exporter = Exporter(folder, options.config)
    try:
        exporter.wait()
        load = "" if options.no_load else command
        result = play(exporter, smi, fields, load, options.seconds)
    finally:
        exporter.end()
    lines = judge(result.rounds, fields)
    lines += instances.compare(result.raw["idle.xml"], result.raw["idle.metrics"])
    uuids = list(result.rounds[-1].told.fields)
    wrong = check_devices.compare(Path(options.driver_root), smi)
    for word in wrong:
        print(f"DIFFERS  {word}")
    report(lines, uuids)
    raw = {**result.raw, "nvml.json": raw_nvml()}
    raw["double.control"] = control.lines(raw["nvml.json"])
    names = (os.uname().nodename,)
    raw = {name: record.masked(text, uuids, names) for name, text in raw.items()}
    print(f"written: {record.write(options.out, about(result, options, wrong), lines, uuids, raw)}")
    if wrong or any(line.finding is Finding.DIFFERED for line in lines):
        print("gpu-check: FAILED: the exporter and nvidia-smi differ")
        return DIFFERS
    if result.fault or options.no_load:
        print(f"gpu-check: idle only: {result.fault or 'no load was wanted'}\n{HOW_TO_LOAD}")
        return UNCHECKED
    print("gpu-check: the exporter, /proc, NVML and nvidia-smi agree")
    return AGREES


HOW_TO_LOAD = (
    "give a load of your own: --load 'PROGRAM --gpu {index} --for {seconds}'; it prints the line "
    "`running` once the GPU is at work, and keeps it so for a {share} of the time"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvidia-smi", default="nvidia-smi", help="the program to compare with")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of three phases")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/hardware")
    parser.add_argument("--driver-root", default="/proc/driver/nvidia")
    parser.add_argument("--config", type=Path, help="a gpulock.conf to begin with")
    parser.add_argument("--load", default="", help=HOW_TO_LOAD.replace("%", "%%"))
    parser.add_argument("--no-load", action="store_true", help="compare an idle machine only")
    options = parser.parse_args(argv)
    if not check_devices.listed_by_driver(Path(options.driver_root)):
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
