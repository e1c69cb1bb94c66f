# SPDX-License-Identifier: Apache-2.0
"""Run the steps of `make test`, `make labs` or `make soak`: several at once, a line for each.

    python3 -m tests.run test|labs|soak [NAME...]       NAME: only the steps that begin so

As root each step runs in a private root of its own (tests/root): nothing is installed or changed on
this machine. As an ordinary user the steps run on the machine itself, but for root's. It needs
Python 3.9 and nothing else. What a step wrote is in build/run/STEP.log.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.root.archive import ArchiveError
from tests.root.build import build, cache_folder
from tests.steps import PLANS, Step

CHECKOUT = Path(__file__).resolve().parents[1]
LOGS = CHECKOUT / "build/run"
LEDGER = CHECKOUT / "tests/ledger.tsv"
RUNS = "GPULOCK_RUNS"  # a file to which each run adds its line
# seconds of a step, after which it is ended: a run that hangs must say where
LIMITS = {"test": 2700, "labs": 2700, "soak": 21600}
DIFFERS = re.compile(r"E +(?:[-+?] |assert |\w+Error)")  # pytest's, of a comparison that failed
SPARE = 6  # steps that mostly wait, at the same time


class Run:
    """One run of a plan: what goes on, what is over, and how long each usually takes."""

    def __init__(self, plan: str, steps: list[Step]) -> None:
        self._target, self._steps, self._limit = f"make {plan}", steps, LIMITS[plan]
        self._times_file = cache_folder() / "times.json"
        self._usual = self._read_times()
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._done = 0
        self._stopped = False
        self.failed: list[str] = []

    def _read_times(self) -> dict[str, float]:
        usual = {step.name: float(step.seconds) for step in self._steps}
        try:
            usual.update(json.loads(self._times_file.read_text()))
        except (OSError, ValueError):
            pass  # the first run of this user
        return usual

    def all(self) -> None:
        """Run every step: the busy ones on a core each, those that wait beside them."""
        queues: dict[bool, queue.Queue[Step]] = {True: queue.Queue(), False: queue.Queue()}
        for step in sorted(self._steps, key=lambda one: -self._usual[one.name]):
            queues[step.is_busy].put(step)
        counts = {True: os.cpu_count() or 1, False: SPARE}
        threads = [
            threading.Thread(target=self._work, args=(queues[is_busy],), daemon=True)
            for is_busy, count in counts.items()
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1)

    def _work(self, steps: queue.Queue[Step]) -> None:
        while not self._stopped:
            try:
                step = steps.get_nowait()
            except queue.Empty:
                return
            self._run_step(step)

    def _run_step(self, step: Step) -> None:
        begun = time.monotonic()
        log = LOGS / f"{step.name.replace(' ', '-').replace('/', '-of-')}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command(step),
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GPULOCK_TARGET": self._target, **dict(step.env)},
                start_new_session=True,
            )
            with self._lock:
                self._running[step.name] = process
            try:
                code = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                file.write(f"not over after {self._limit} s; ended\n".encode())
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            with self._lock:
                del self._running[step.name]
        if not self._stopped:
            self._report(step, code, time.monotonic() - begun, log)

    def _command(self, step: Step) -> list[str]:
        if os.geteuid() != 0:
            return ["env", f"PATH={CHECKOUT}/.venv/bin:{os.environ['PATH']}", *step.words]
        return [str(CHECKOUT / "tests/root/enter.sh"), step.root, *step.words]

    def _report(self, step: Step, code: int, seconds: float, log: Path) -> None:
        with self._lock:
            self._done += 1
            usually = self._usual[step.name]
            count = f"[{self._done:2}/{len(self._steps)}]"
            last = log.read_text(errors="replace").rstrip().rpartition("\n")[2].strip("= ")
            word = last[:90] if code == 0 else f"FAILED, see {log.relative_to(CHECKOUT)}"
            print(f"{count} {step.name:22} {seconds:6.1f} s (usually {usually:.0f})  {word}")
            going = ", ".join(sorted(self._running))
            if going and sys.stdout.isatty():
                print(f"        running: {going}", end="\r")
            sys.stdout.flush()
            if code != 0:
                self.failed.append(step.name)
                print(tail_of(log), flush=True)
            else:
                self._usual[step.name] = seconds
                self._times_file.parent.mkdir(parents=True, exist_ok=True)
                self._times_file.write_text(json.dumps(self._usual))

    def stop(self) -> None:
        """End what runs: each step's processes are all below one of its own namespace."""
        self._stopped = True
        with self._lock:
            for process in self._running.values():
                os.killpg(process.pid, signal.SIGTERM)
        for process in list(self._running.values()):
            process.wait()


def tail_of(log: Path, lines: int = 60) -> str:
    """Return the end of a step's log, indented, and what differed before that."""
    all_lines = log.read_text(errors="replace").splitlines()
    earlier = [line for line in all_lines[:-lines] if DIFFERS.match(line)][-lines:]
    return "\n".join(f"    {line[:300]}" for line in [*earlier, *all_lines[-lines:]])


def main() -> int:
    """Run the steps of a plan; exit 1 where one failed, 130 on an interrupt."""
    plan, *names = sys.argv[1:]
    steps = [one for one in PLANS[plan] if not names or one.name.startswith(tuple(names))]
    left_out: list[str] = []
    if os.geteuid() != 0:
        left_out = [f"{one.name} ({why})" for one in steps if (why := why_not_here(one))]
        steps = [one for one in steps if not why_not_here(one)]
    LOGS.mkdir(parents=True, exist_ok=True)
    before = LEDGER.read_text()
    begun = time.monotonic()
    run = Run(plan, steps)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if os.geteuid() == 0:
            prepare(sorted({step.root for step in steps}))
        run.all()
    except ArchiveError as fault:
        print(f"make {plan}: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        run.stop()
        return 130
    minutes, seconds = divmod(int(time.monotonic() - begun), 60)
    result = f"failed: {', '.join(run.failed)}" if run.failed else "all passed"
    print(f"make {plan}: {len(steps)} steps in {minutes} min {seconds} s, {result}")
    again = LEDGER.read_text()[len(before) :]
    if again:
        print(f"RUN AGAIN, since a wait gave up; commit {LEDGER.relative_to(CHECKOUT)}:\n{again}")
    if RUNS in os.environ:
        note_run(Path(os.environ[RUNS]), f"make {plan}", f"{minutes}:{seconds:02}\t{result}")
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    return 1 if run.failed else 0


def note_run(path: Path, target: str, result: str) -> None:
    """Add a line to the record of runs: when, which commit, what, minutes, result, load."""
    words = ["git", "-C", str(CHECKOUT), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    load = f"load {os.getloadavg()[2]:.0f}"
    when = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())
    with path.open("a") as file:
        file.write("\t".join([when, commit, target, result, load]) + "\n")


def why_not_here(step: Step) -> str:
    """Return why an ordinary user cannot run a step on this machine, or nothing."""
    if step.needs_root:
        return "root's"
    return "" if shutil.which(step.program) else f"no {step.program} here"


def prepare(roots: list[str]) -> None:
    """Make the private roots that are not there yet: one sentence says so, and how long it took.

    Raises ArchiveError; in a chroot it exits with the reason.
    """
    check = ["bash", "-c", 'source "$0"; refuse_chroot', str(CHECKOUT / "tests/root/cgroups.sh")]
    if subprocess.run(check, check=False).returncode != 0:
        sys.exit(1)
    for name in roots:
        begun = time.monotonic()
        build(name)
        seconds = time.monotonic() - begun
        if seconds > 1:
            print(
                f"private root {name} made in {seconds:.0f} s, kept in {cache_folder()}", flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
