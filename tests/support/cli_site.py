# SPDX-License-Identifier: Apache-2.0
"""A simulated node to call the command line on, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import Result

from gpulock.cli import command_group
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store import verdicts
from gpulock.store.owner import Owner
from gpulock.store.verdicts import Verdict
from gpulock.workstation.process_claims import ensure_node_dirs
from tests.support.locks import place_lock
from tests.support.runner import command_runner
from tests.support.trees import record

NOBODY = 65534
PROGRAM = (sys.executable, "-c", "from gpulock.cli import main; main()")
ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A node of a preset below `folder`."""

    def __init__(self, folder: Path, preset: str = "dgx1", gpus: int | None = None) -> None:
        self.files = write_simulated_node(folder / "node", preset, gpus)
        self.config = str(self.files.config)
        self.gpulock = f"gpulock --config {self.config}"  # as every next command begins

    def call(self, *args: str) -> Result:
        """Run a command in this process."""
        return command_runner().invoke(command_group, ["--config", self.config, *args])

    def words(self, *args: str) -> str:
        """Return what a command prints, with a blank between two words."""
        return " ".join(self.call(*args).stdout.split())

    def set(self, text: str) -> None:
        """Add lines to the settings."""
        with self.files.config.open("a") as file:
            file.write(text)

    def command(self, *args: str) -> list[str]:
        """Return the argument list of a command as a process of its own."""
        return [*PROGRAM, "--config", self.config, *args]

    def start(self, *args: str, **others: Any) -> subprocess.Popen[str]:
        """Start a command as a process with pipes."""
        options: dict[str, Any] = {"cwd": ROOT, **others}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*args), stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options
        )

    @contextmanager
    def running(self, *args: str) -> Generator[subprocess.Popen[str]]:
        """Give a command as a process that has printed a line; then its input ends, and it."""
        process = self.start(*args)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() != ""
            yield process
        finally:
            process.communicate(timeout=60)

    def run(self, *args: str, **others: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as a process to its end."""
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": ROOT, **others}
        return subprocess.run(
            self.command(*args),
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
            **options,
        )

    def shell(self, script: str, shell: str = "/bin/sh", **others: Any) -> str:
        """Let a shell run a script whose `"$@"` is gpulock, well; return what it printed."""
        line = [shell, "-c", script, "sh", *self.command()]
        output: str = subprocess.check_output(line, text=True, cwd=ROOT, **others)
        return output

    @contextmanager
    def opened(self, *names: int | str) -> Generator[subprocess.Popen[bytes]]:
        """Have device files open in a process of no claim: a card by its minor, others by name."""
        files = [f"nvidia{name}" if isinstance(name, int) else name for name in names]
        folder = self.files.dev_root
        opens = "; ".join(f"exec {3 + n}<{folder}/{name}" for n, name in enumerate(files))
        with subprocess.Popen(
            ["/bin/sh", "-c", f"{opens}; echo; read -r line"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield process

    def json(self, *args: str) -> Any:
        """Return what `status --json` says."""
        return json.loads(self.call("status", "--json", *args).stdout)

    def states(self) -> list[str]:
        """Return the state of each device."""
        return [gpu["state"] for gpu in self.json()["gpus"]]

    def node(self) -> Node:
        """Return the node, made ready for claims."""
        node = Node(read_settings(self.config))
        ensure_node_dirs(node)
        return node

    def id(self, index: int) -> str:
        """Return the lock id of a GPU."""
        return self.files.machine.gpus[index].bus

    def lose_card(self, index: int) -> None:
        """Let a card fall off the bus: the driver does not show it any more."""
        shutil.rmtree(self.files.driver_root / "gpus" / self.id(index))

    def spoil(self, index: int, text: str = "garbage\n") -> None:
        """Let a lock have no record, and an owner that cannot be understood."""
        store = self.node().store
        record = store.read(self.id(index)).owner
        assert record
        shutil.rmtree(f"{store.claims_dir}/{record.token}")
        Path(store.locks_dir, self.id(index), "owner").write_text(text)

    def hold(self, *indexes: int, token: str = "t", **fields: object) -> Owner:
        """Lock devices with a record of a Grid Engine job, or of what `fields` say."""
        node = self.node()
        base: dict[str, object] = {
            "node": node.name,
            "uid": 4242,
            "boot_id": node.boot_id,
            "namespaces": node.proc.namespaces(""),
            "pid": os.getpid(),
            "start": node.proc.start(os.getpid()),
            "add_grp_id": 0,
            "claimed_at": time.time(),
            "claimed_boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
            "token": token,
            "devices": tuple(self.id(index) for index in indexes),
        }
        held = record(**base | fields)
        for index in indexes:
            place_lock(node.store, self.id(index), held)
        return held

    def hold_places(self, index: int, job_id: str, *places: int, **fields: object) -> None:
        """Let a job have some of the four places of a GPU; its token is `t` and its number."""
        ids = tuple(f"{self.id(index)}.share{number}" for number in places)
        own = {"job_id": job_id, "devices": ids, "places": 4, **fields}
        held = self.hold(token=f"t{job_id}", **own)
        for name in ids:
            place_lock(self.node().store, name, held)

    def publish(self, **found: Verdict) -> None:
        """Publish verdicts by token, as a reconcile does."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        verdicts.write_verdicts(str(self.files.lock_dir), found, boot_id)


def dead_process() -> tuple[int, int]:
    """Return pid and a start time of a process that is gone."""
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    return process.pid, 1
