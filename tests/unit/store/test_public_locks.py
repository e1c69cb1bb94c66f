# SPDX-License-Identifier: Apache-2.0
"""No file that another user can open carries a lock that counts, and no lease of one holds us up.

flock(2) asks for no right but an open file, and a reader has one. So each lock of the product is on
a file that its own uid alone may open.
"""

from __future__ import annotations

import ast
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.state.claim_accounting import LedgerAccount

from gpulock.cli import command_group
from gpulock.daemon.app import make_daemon_chores
from gpulock.daemon.core import sample
from gpulock.daemon.core.instance_lock import InstanceLock
from gpulock.daemon.history.files import name_month
from gpulock.daemon.main_loop import Rounds
from gpulock.daemon.reconcile.inventory_file import read_inventory_file
from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.deadline import Deadline, clock_boottime
from gpulock.install.files import lock_installation
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store import quarantine
from gpulock.store.gate import Gate
from gpulock.workstation.waiting import encode_waiting, write_waiting
from tests.support.exporter_nodes import Node as Seen
from tests.support.exporter_nodes import card
from tests.support.journal import HeardJournal
from tests.support.runner import command_runner

ROOT = Path(__file__).resolve().parents[3]
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def only_gpulockd(settings: Settings) -> Generator[None]:
    lock = InstanceLock()
    lock.take(settings.lock_dir)
    yield
    lock.release()


@contextmanager
def only_exporter(settings: Settings) -> Generator[None]:
    folder = ExporterFolder(settings.exporter_dir)
    folder.hold()
    yield
    folder.release()


# every lock of the product
LOCKS: dict[str, Callable[[Settings], AbstractContextManager[object]]] = {
    "gate": lambda settings: Gate(settings.lock_dir, Deadline(0)),
    "gpulockd": only_gpulockd,
    "history": lambda settings: Gate(f"{settings.state_dir}/history", Deadline(0)),
    "exporter": only_exporter,
    "installation": lambda settings: lock_installation(Path(settings.state_dir)),
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A node with everything that it has while it runs: claims, history, samples, notes, locks."""
    made = write_simulated_node(tmp_path / "node", "dgx1")
    made.config.write_text(f"{made.config.read_text()}USER_CLAIMS=yes\n")
    found = read_settings(str(made.config))
    who = ["--pid", str(os.getpid())]
    for words in (["claim", "--devices", "0"], ["release"], ["claim", "--devices", "1,2"]):
        done = command_runner().invoke(command_group, ["--config", str(made.config), *words, *who])
        assert done.exit_code == 0, done.output
    seen, folder = Seen(), ExporterFolder(found.exporter_dir)
    seen.tick(card())
    folder.open()
    folder.write_sample(seen.text())
    ended = {"feedface": {"0000:06:00.0": LedgerAccount(1.0, 2.0)}}
    folder.write_finished(ended, "boot", seen.moment)
    folder.write_inventory({"0000:06:00.0": card()}, "boot")
    quarantine.write_device_note(found.state_dir, quarantine.QUARANTINE, "0000:07:00.0", "me", "x")
    journal = HeardJournal()
    rounds = Rounds(DaemonNode(found), journal, make_daemon_chores(journal))
    assert rounds.run_round(clock_boottime()), journal.said()
    write_waiting(found.lock_dir, encode_waiting([], "boot"))
    with ExitStack() as everything:
        for name in sorted(LOCKS.keys() - {"gpulockd"}):
            everything.enter_context(LOCKS[name](found))
    rounds.close()
    return found


def everything(settings: Settings) -> list[Path]:
    """Return all files and folders of a node that gpulock made."""
    roots = [Path(p) for p in (settings.lock_dir, settings.state_dir, settings.exporter_dir)]
    return [path for root in roots for path in (root, *root.rglob("*"))]


@pytest.mark.attack
def test_a_user_who_locks_whatever_they_can_open_keeps_nobody_from_anything(
    settings: Settings,
) -> None:
    """Tried: a flock on each file that a user can open, the exporter's lock file as well.

    Stopped by: no file that a user can open carries a lock that counts.
    """
    found = [path for path in everything(settings) if path.stat().st_mode & OTHERS]
    names = {path.name for path in found}
    assert {"owner", "events", "sample", name_month(time.time()), "verdicts"} <= names
    with ExitStack() as hostile:
        for path in found:
            fd = os.open(path, os.O_RDONLY)
            hostile.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with ExitStack() as ours:
            for take in LOCKS.values():
                ours.enter_context(take(settings))


def test_locks_are_taken_in_these_modules_alone() -> None:
    names = ("flock", "lockf", "FileLock", "SoftFileLock", "fcntl")
    found: set[str] = set()
    for path in [*ROOT.glob("gpulock/**/*.py"), *ROOT.glob("exporter/**/*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            if not isinstance(node, ast.Call) or "SET_PIPE_SIZE" in ast.unparse(node):
                continue
            if ast.unparse(node.func).rpartition(".")[2] in names:
                found.add(str(path.relative_to(ROOT)))
    assert found == {"gpulock/store/gate.py", "gpulock/install/files.py"}


@contextmanager
def leased(path: Path) -> Generator[None]:
    """Let another process have a lease on a file of its own, and not give it up."""
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fd = os.open(path, os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.write(ends[1], b"leased")
        signal.pause()
    assert os.read(ends[0], 6) == b"leased"
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in ends:
            os.close(fd)


READERS: dict[str, Callable[[Path], object]] = {
    "sample": lambda path: sample.load_sample_file(str(path), sample.SAMPLE_LINE),
    "finished": lambda path: sample.load_sample_file(str(path), sample.FINISHED_LINE),
    "inventory": lambda path: read_inventory_file(str(path), "boot")[0] or None,
}


@pytest.mark.attack
@pytest.mark.timeout(30)  # the kernel waits 45 s for one who does not give it up
@pytest.mark.parametrize("name", READERS)
def test_a_lease_on_what_another_user_writes_holds_up_no_reader(tmp_path: Path, name: str) -> None:
    """Tried: a lease on a file that another user's program reads.

    Stopped by: readers open without waiting for it.
    """
    path = tmp_path / name
    path.write_text("anything")
    with leased(path):
        assert READERS[name](path) is None
