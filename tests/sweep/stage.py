# SPDX-License-Identifier: Apache-2.0
"""The node on which the sweep plays: three jobs, and a way back to how everything was.

`mine` is the job whose hooks are stopped; `other` lives and holds two devices all the time; a
third one died and left its locks. PROC_ROOT shows their shepherds and nobody else, so that the
number of system calls does not depend on this machine; a shepherd dies by losing its link there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from gpulock.claim import claim
from gpulock.daemon.process import judge, template
from gpulock.daemon.reconcile import reconcile
from gpulock.deadline import Deadline
from gpulock.grant import Grant
from gpulock.locks import Lock
from gpulock.node import Node
from gpulock.simulate.execd import SpooledJob
from tests.bench.scene import Scene, linked_proc
from tests.bench.shepherd import Parent

MINE, OTHER, GONE = 1001, 1002, 1003
REAP = Path(__file__).with_name("reap.py")
CHECKOUT = Path(__file__).resolve().parents[2]
WORKING_FOLDER = re.compile(r"AT_FDCWD<[^>]*>")  # strace -y shows it with every absolute path
KEPT = ("run", "state", "sge")  # below the node: LOCK_DIR, STATE_DIR, the spool


class Stage:
    """The node below `root`. Close it: two shepherds are processes."""

    def __init__(self, root: Path, preset: str = "dgx1") -> None:
        self.proc = linked_proc(root / "proc", (os.getpid(),))
        self.scene = Scene(root, self.proc, preset)
        self.log = root / "strace.log"
        self.stderr = root / "stderr"
        self._saved = root / "saved"
        self.mine = self._start(MINE, 2)
        self.other = self._start(OTHER, 2)
        self.node: Node = self.scene.node()

    def close(self) -> None:
        """End the shepherds."""
        self.mine.end()
        self.other.end()

    def _start(self, job_id: int, gpus: int) -> Parent:
        parent = Parent(self.scene.spool(job_id, gpus))
        self._link(parent)
        return parent

    def _link(self, parent: Parent) -> None:
        (self.proc / str(parent.pid)).symlink_to(f"/proc/{parent.pid}")

    def bury(self, parent: Parent) -> None:
        """Let a shepherd look dead."""
        (self.proc / str(parent.pid)).unlink()

    def raise_again(self, parent: Parent) -> None:
        """Let a shepherd that was buried look alive."""
        self._link(parent)

    def hook(self, parent: Parent, name: str, head: Sequence[str] = ()) -> int:
        """Run prolog or epilog of a job, behind `head`; return the exit code."""
        paths = {"prolog": self.scene.hooks.prolog, "epilog": self.scene.hooks.epilog}
        argv = [*head, str(paths[name]), str(parent.pid)]
        return parent.run(argv, proc=str(self.proc), stderr=str(self.stderr)).status

    def reap(self, head: Sequence[str] = ()) -> int:
        """Run one reconcile as a process of its own; return the exit code."""
        program = [self.scene.interpreter, "-IS", str(REAP), str(CHECKOUT), str(self.scene.config)]
        argv = [*head, *program]
        return self.other.run(argv, proc=str(self.proc), stderr=str(self.stderr)).status

    def leave_dead_locks(self, gpus: int) -> None:
        """Let a job claim, and die without an epilog."""
        gone = self._start(GONE, gpus)
        self.must(self.hook(gone, "prolog"), 0)
        self.bury(gone)
        gone.end()

    def leave_cut_short(self) -> None:
        """Leave what a claim leaves that is killed between mkdir and owner record."""
        free = [d.id for d in self.node.devices() if d.id not in self.node.store.all()]
        os.mkdir(f"{self.node.store.locks_dir}/{free[-1]}", 0o755)

    def must(self, code: int, expected: int) -> None:
        """Raise RuntimeError when a run that nothing disturbed ended otherwise."""
        if code != expected:
            raise RuntimeError(f"undisturbed, it exits {code}: {self.stderr.read_text()}")

    def is_near(self, call: str) -> bool:
        """Return whether a traced call is on the locks, the state or the spool."""
        named = WORKING_FOLDER.sub("", call)
        return any(f"{self.scene.root}/{name}/" in named for name in KEPT)

    def save(self) -> None:
        """Take the present state as the one that `reset` comes back to."""
        shutil.rmtree(self._saved, ignore_errors=True)
        for name in KEPT:
            shutil.copytree(self.scene.root / name, self._saved / name)

    def reset(self) -> None:
        """Bring back locks, state and spool; the shepherds' folders stay the same folders."""
        for name in KEPT:
            restore(self._saved / name, self.scene.root / name)

    def reconcile(self) -> None:
        """Reconcile once in this process, undisturbed."""
        reconcile(self.node, judge(self.node), Deadline(20))

    def claim_rest(self, count: int) -> Grant:
        """Claim devices in this process."""
        record = template(self.node, os.getpid(), "sweep")
        return claim(self.node, record, count, lambda: judge(self.node), Deadline(20))

    def locks(self, parent: Parent | None = None) -> dict[str, Lock]:
        """Return the locks, those of one job or all."""
        found = self.node.store.all() if self.node.store.exists() else {}
        if parent is None:
            return found
        job = str(parent.job.job.job_id)
        return {
            name: lock for name, lock in found.items() if lock.owner and lock.owner.job_id == job
        }

    def records(self, parent: Parent) -> dict[str, bytes]:
        """Return the bytes of a job's owner records."""
        folder = Path(self.node.store.locks_dir)
        return {name: (folder / name / "owner").read_bytes() for name in self.locks(parent)}

    def mask(self, job: SpooledJob) -> list[str]:
        """Return what the job's environment file says of CUDA_VISIBLE_DEVICES, every time."""
        lines = (job.folder / "environment").read_text().splitlines()
        return [
            v for k, _, v in (line.partition("=") for line in lines) if k == "CUDA_VISIBLE_DEVICES"
        ]

    def outside(self) -> dict[str, tuple[int, int, int, int]]:
        """Return inode, size, mode and time of all that no hook may touch."""
        found: dict[str, tuple[int, int, int, int]] = {}
        for path in walk(self.scene.root, KEPT):
            info = path.lstat()
            found[str(path)] = (info.st_ino, info.st_size, info.st_mode, info.st_mtime_ns)
        return found


def walk(folder: Path, left_out: Sequence[str] = ()) -> list[Path]:
    """Return everything below a folder."""
    found: list[Path] = []
    for path in folder.iterdir():
        if path.name not in left_out:
            found.append(path)
            if path.is_dir() and not path.is_symlink():
                found += walk(path)
    return found


def restore(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds, and nothing else; folders that stay are kept."""
    wanted = {path.name for path in source.iterdir()}
    for path in target.iterdir():
        if path.name not in wanted:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in source.iterdir():
        there = target / path.name
        if path.is_dir():
            there.mkdir(exist_ok=True)
            shutil.copystat(path, there)
            restore(path, there)
        else:
            shutil.copy2(path, there)
