# SPDX-License-Identifier: Apache-2.0
"""A simulated node in memory with its hooks rendered: what bench and sweep both play on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store import atomic, boot
from tests.support import execd
from tests.support.packed_job import ResourceRequest

MEMORY, TEMPORARY = "/dev/shm", ""  # /run is a tmpfs as well; TMPDIR


@contextmanager
def folder(name: str, *places: str) -> Generator[Path]:
    """Give a folder where locks may lie and hooks be executed, and remove it.

    It is in the first of `places` where that is so; where none is named, in memory if possible.
    """
    parent = find_place((*(places or (MEMORY, TEMPORARY)), "/var/tmp"))
    made = Path(tempfile.mkdtemp(prefix=f"gpulock-{name}-", dir=parent))
    try:
        made.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def find_place(places: Sequence[str]) -> str:
    """Return the first folder where locks may lie and hooks be executed, else TMPDIR."""
    for place in places:
        path = place or tempfile.gettempdir()
        try:
            local = boot.file_system_type(path) in atomic.LOCAL_FILE_SYSTEMS
            if local and os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_NOEXEC:
                return path
        except OSError:
            continue
    return tempfile.gettempdir()


class Scene:
    """A node of 8 GPUs below `root`, with rendered hooks; `proc` is the PROC_ROOT it is given."""

    def __init__(self, root: Path, proc: Path | None = None, preset: str = "dgx1") -> None:
        self.root = root / "node"
        self.simulated = write_simulated_node(self.root, preset)
        self.config = self.simulated.config
        if proc is not None:
            with self.config.open("a") as file:
                file.write(f"PROC_ROOT={proc}\n")
        self.hooks: HookPaths = render_hooks(root / "hooks", self.config)
        first = self.hooks.prolog.read_text().partition("\n")[0]
        self.interpreter = first.removeprefix("#!").split()[0]

    def node(self) -> Node:
        """Return the node as every command sees it."""
        return Node(read_settings(str(self.config)))

    def spool(self, job_id: int, gpus: int) -> execd.SpooledJob:
        """Spool a job that asks for so many GPUs."""
        wanted = (ResourceRequest("gpu", gpus, str(gpus)),)
        job = execd.SimulatedJob(job_id, ("/bin/true",), resources=wanted, cwd=str(self.root))
        return execd.spool_job(self.root, job)


def linked_proc(folder_: Path, pids: Sequence[int]) -> Path:
    """Make a /proc in which only `pids` are to be seen: links to the real one.

    What a scan sees then does not depend on who else uses this machine.
    """
    folder_.mkdir()
    for name in ("self", "sys", *map(str, pids)):
        (folder_ / name).symlink_to(f"/proc/{name}")
    return folder_


def configured(scene: Scene, hook: Path, name: str, settings: str) -> str:
    """Return a variant of a hook that has settings of its own, in NAME.conf.

    And a STATE_DIR of its own, with the same notes in it: there root keeps a copy of the settings
    obeyed last, and hooks that take turns would write it anew each time.
    """
    state, own = scene.root / "state", scene.root / f"state-{name}"
    if not own.is_dir():
        own.mkdir()
        for notes in ("owed", "quarantine"):
            (state / notes).mkdir(parents=True, exist_ok=True)
            (own / notes).symlink_to(state / notes)
    config = scene.config.with_name(f"{name}.conf")
    config.write_text(settings.replace(f"STATE_DIR={state}\n", f"STATE_DIR={own}\n"))
    text, known = hook.read_text(), repr(str(scene.config))
    if text.count(known) != 1:
        raise RuntimeError(f"{hook} does not name its settings once")
    path = hook.with_name(f"{hook.name}-{name}")
    path.write_text(text.replace(known, repr(str(config))))
    path.chmod(0o755)
    return str(path)
