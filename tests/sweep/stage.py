# SPDX-License-Identifier: Apache-2.0
"""The node on which the sweep plays, and a way back to how everything was.

PROC_ROOT shows the processes that matter and nobody else, so that the number of system calls does
not depend on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.locks import Lock
from gpulock.workstation.process_claims import make_process_owner
from tests.support.scene import Scene, linked_proc

MINE, OTHER, GONE = 1001, 1002, 1003
ROUND = Path(__file__).with_name("round.py")
CHECKOUT = Path(__file__).resolve().parents[2]
LIBRARIES = f"{CHECKOUT}:{sysconfig.get_path('purelib')}"
WORKING_FOLDER = re.compile(r"AT_FDCWD<[^>]*>")  # strace -y shows it with every absolute path


class Stage:
    """The node below `root`; `kept` are the folders in which hooks may write.

    `log` is strace's, `stderr` has all that a hook said.
    """

    kept: tuple[str, ...] = ("run", "state")  # LOCK_DIR with the records beside it, STATE_DIR

    def __init__(self, root: Path, preset: str = "dgx1") -> None:
        self.proc = linked_proc(root / "proc", (os.getpid(),))
        self.scene = Scene(root, self.proc, preset)
        self.log = root / "strace.log"
        self.stderr = root / "stderr"
        self._saved = root / "saved"
        self.node: Node = self.scene.node()

    def close(self) -> None:
        """End what was started."""

    def configure(self, **keys: str) -> None:
        """Change settings of the node."""
        text = self.scene.config.read_text()
        kept = [line for line in text.splitlines() if line.partition("=")[0] not in keys]
        lines = [*kept, *(f"{key}={value}" for key, value in keys.items())]
        self.scene.config.write_text("\n".join(lines) + "\n")
        self.node = self.scene.node()

    def link(self, pid: int) -> None:
        """Let a process be seen."""
        (self.proc / str(pid)).symlink_to(f"/proc/{pid}")

    def unlink(self, pid: int) -> None:
        """Let a process look dead."""
        (self.proc / str(pid)).unlink()

    def command_of(self, what: str) -> list[str]:
        """Return the command of one `reap` or `round` as a process of its own."""
        config = str(self.scene.config)
        return [self.scene.interpreter, "-IS", str(ROUND), LIBRARIES, what, config]

    def leave_cut_short(self) -> None:
        """Leave what a claim leaves that is killed between the mkdir of a lock and its copy."""
        free = [d.id for d in self.node.devices() if d.id not in self.node.store.read_all_locks()]
        os.mkdir(f"{self.node.store.locks_dir}/{free[-1]}", 0o755)

    def must(self, code: int, expected: int) -> None:
        """Raise RuntimeError when a run that nothing disturbed ended otherwise."""
        if code != expected:
            raise RuntimeError(f"undisturbed, it exits {code}: {self.stderr.read_text()}")

    def is_near(self, call: str) -> bool:
        """Return whether a traced call is on what a hook may change."""
        named = WORKING_FOLDER.sub("", call)
        if '"/proc/self/fd/' in named:  # LOCK_DIR, while the gate is held
            return True
        return any(f"{self.scene.root}/{name}{end}" in named for name in self.kept for end in "/>")

    def save(self) -> None:
        """Take the present state as the one that `reset` comes back to."""
        shutil.rmtree(self._saved, ignore_errors=True)
        for name in self.kept:
            shutil.copytree(self.scene.root / name, self._saved / name)

    def reset(self) -> None:
        """Bring back all that may change; folders that processes are in stay the same folders."""
        for name in self.kept:
            restore(self._saved / name, self.scene.root / name)

    def reconcile(self) -> None:
        """Reconcile once in this process, undisturbed."""
        reconcile_locks(self.node, make_liveness_judge(self.node), Deadline(20))

    def claim_rest(self, count: int) -> Grant:
        """Claim devices in this process."""
        record = make_process_owner(self.node, os.getpid(), "sweep")
        return claim_devices(
            self.node,
            record,
            ClaimRequest(count),
            lambda: make_liveness_judge(self.node),
            Deadline(20),
        )

    def locks(self, *jobs: int) -> dict[str, Lock]:
        """Return the locks of these jobs, or without any all there are."""
        found = self.node.store.read_all_locks()
        wanted = {str(job) for job in jobs}
        return {
            name: lock
            for name, lock in found.items()
            if not jobs or (lock.owner and lock.owner.job_id in wanted)
        }

    def records(self, *jobs: int) -> dict[str, bytes]:
        """Return the bytes of these jobs' owner records, as their locks have them."""
        folder = Path(self.node.store.locks_dir)
        paths = {name: folder / name / "owner" for name in self.locks(*jobs)}
        return {name: path.read_bytes() if path.exists() else b"" for name, path in paths.items()}

    def inside(self) -> dict[str, bytes]:
        """Return all files in which hooks may write, by path."""
        paths = [path for name in self.kept for path in walk(self.scene.root / name)]
        return {str(p): p.read_bytes() if p.is_file() else b"" for p in paths}

    def outside(self) -> dict[str, tuple[int, int, int, int]]:
        """Return inode, size, mode and time of all that no hook may touch."""
        found: dict[str, tuple[int, int, int, int]] = {}
        for path in walk(self.scene.root, self.kept):
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
            there.unlink(missing_ok=True)  # it may have a second name
            shutil.copy2(path, there)
