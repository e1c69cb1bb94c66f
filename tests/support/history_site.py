# SPDX-License-Identifier: Apache-2.0
"""A Box whose claims end, and an exporter's folder that says what they did."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpulock.daemon.core.sample import FINISHED_LINE, SAMPLE_LINE
from gpulock.daemon.history.files import name_month
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import boot, grants
from gpulock.store.owner import Owner
from tests.support.locks import retire_lock
from tests.support.trees import BOOT, OTHER_BOOT, Box, bus, record

GIB = 1 << 30


def read_history(state: Path) -> list[dict[str, Any]]:
    """Return each line of the history of a STATE_DIR; one without an end is being written."""
    paths = sorted((state / "history").glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def write_history(history: HistoryWriter, node: Node, devices: Sequence[Device] = ()) -> int:
    """Let an author write what is over, where no claim stands; return how many lines."""
    before = count_lines(node)
    history.run(node, ReconcileReport([], [], devices=list(devices)), 0.0)
    return count_lines(node) - before


def count_lines(node: Node) -> int:
    """Return how many lines the history of a node has."""
    files = Path(node.settings.state_dir, "history").glob("*.jsonl")
    return sum([path.read_bytes().count(b"\n") for path in files if path.is_file()])


class Ended(Box):
    """A node with the history of its claims."""

    def __init__(self, root: Path, **keys: str) -> None:
        self.exporter = root / "run-exporter"
        (self.exporter / "finished").mkdir(parents=True)
        super().__init__(root, 4, **keys)
        node = self.node()
        node.store.check(make=True)
        boot.begin_boot(node.store, str(self.state), BOOT, node.name)
        self.told: list[str] = []
        self.history = HistoryWriter(self.told.append)

    def hold(self, *numbers: int, token: str = "feed", ago: float = 100.0, **about: Any) -> Owner:
        """Let a claim stand that was made `ago` seconds ago."""
        fields: dict[str, Any] = {
            "token": token,
            "devices": tuple(bus(number) for number in numbers),
            "uuids": tuple(f"GPU-{number}" for number in numbers),
            "minors": tuple(str(number) for number in numbers),
            "claimed_at": time.time() - ago,
            "claimed_boottime": clock_boottime() - ago,
        }
        own = record(**fields | about)
        grants.make_claim(self.node().store, own)
        if own.draining:
            self.node().store.mark_draining(own.token)
        return own

    def run_job(self, *numbers: int, token: str = "feed", **about: Any) -> Owner:
        """Let a claim stand whose record is in STATE_DIR as well, as a prolog notes it."""
        own = self.hold(*numbers, token=token, **about)
        grants.note_owed_line(str(self.state), self.node().store, own)
        return own

    def reboot(self, wiped: bool = True) -> None:
        """Let the node come up again, with a /run that is empty."""
        self.proc.boot(OTHER_BOOT if self.node().boot_id == BOOT else BOOT)
        if wiped:
            self.lose_run()
        node = self.node()
        node.store.check(make=True)
        boot.prepare_boot(node.store, str(self.state), node.boot_id, node.name)
        self.history = HistoryWriter(self.told.append)

    def lose_run(self) -> None:
        """Remove all that is in /run: locks and records."""
        shutil.rmtree(self.lock)
        shutil.rmtree(self.records)

    def end(self, *numbers: int, how: str = "epilog") -> None:
        """Release devices."""
        store = self.node().store
        for number in numbers:
            retire_lock(store, store.read(bus(number)), how)

    def claim(self, *numbers: int, token: str = "feed", **about: Any) -> Owner:
        """Let a claim be made and end."""
        own = self.hold(*numbers, token=token, **about)
        self.end(*numbers)
        return own

    def account(self, own: Owner, number: int, **fields: object) -> str:
        """Return the exporter's line of one device of a claim: half at work, by default."""
        since = own.claimed_boottime
        pairs: dict[str, object] = {
            "since": since,
            "until": since + 100,
            "busy": 40.0,
            "observed": 80.0,
            "seen": since + 100,
            "idle": 5.0,
            "last_busy": since + 95,
            "energy": 5000.0,
            "memory_peak": 3 * GIB,
            "foreign": 0.0,
            "width": 2.0,
            "used": ",".join(["1000"] * 40),
            "covered": ",".join(["2000"] * 40),
            **fields,
        }
        text = " ".join(f"{key}={value}" for key, value in pairs.items())
        return f"token {own.token} {bus(number)} {text}"

    def finish(self, own: Owner, *lines: str) -> None:
        """Let the exporter say what is left of a claim."""
        head = [FINISHED_LINE, f"boot_id={BOOT}", f"boottime={clock_boottime()}"]
        text = "\n".join([*head, f"wall={time.time()}", *lines, ""])
        (self.exporter / "finished" / own.token).write_text(text)

    def sample(self, *lines: str, ago: float = 0.0) -> None:
        """Let the exporter say how things stand."""
        now, wall = clock_boottime() - ago, time.time() - ago
        cards = [
            f"device {bus(n)} index={n} looked={now} memory_total={80 * GIB}" for n in range(4)
        ]
        head = [SAMPLE_LINE, f"boot_id={BOOT}", "sequence=1", f"boottime={now}", f"wall={wall}"]
        (self.exporter / "sample").write_text("\n".join([*head, *cards, *lines]) + "\n")

    def write(self) -> int:
        """Run the chore once; return how many lines it wrote."""
        node = self.node()
        return write_history(self.history, node, node.devices())

    @property
    def path(self) -> Path:
        """The file of this month."""
        return self.state / "history" / name_month(time.time())

    def lines(self) -> list[dict[str, Any]]:
        """Return what the history has, every line of every file."""
        return read_history(self.state)

    def tokens(self) -> list[str]:
        """Return the tokens in the history."""
        return [str(found["token"]) for found in self.lines()]

    def owed(self) -> list[str]:
        """Return whose line is owed."""
        folder = self.state / grants.OWED
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def waiting(self) -> list[str]:
        """Return the claims that are over and wait for their line."""
        return sorted(path.name for path in (self.records / "finished").iterdir())

    def finished(self, token: str = "feed") -> Path:
        """Return the folder of a claim that is over."""
        return self.records / "finished" / token
