# SPDX-License-Identifier: Apache-2.0
"""Device nodes without a driver, and what the kernel says to who opens them.

ENXIO: it may, and there is no driver. EPERM: its cgroup may not. EACCES: the node's mode says no.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from gpulock.isolation import bpf, tree
from gpulock.isolation.tree import LAUNCHER, PREFIX
from gpulock.node.devices import MAJOR
from tests.labs.common.processes import parent_of
from tests.support.pairs import zip_equal
from tests.support.wait import GaveUp, wait_until

CONTROL = 255  # nvidiactl
TREES = tree.find_hierarchies("/sys")
# For the node's interpreter, as the job's user: NAME=ERROR of every node, in order.
PROBE = """
import errno, os, sys
for name in sorted(os.listdir(sys.argv[1])):
    try:
        os.close(os.open(f"{sys.argv[1]}/{name}", os.O_RDWR))
        said = "OPEN"
    except OSError as fault:
        said = errno.errorcode[fault.errno]
    print(f"{name}={said}")
"""
LOCK = Path(__file__).resolve().parents[3] / "build/isolation.lock"  # every cell has that folder
NEXT_ID = 11  # BPF_PROG_GET_NEXT_ID of linux/bpf.h


def make_nodes(folder: Path, count: int) -> None:
    """Make nvidia0, nvidia1, ... and nvidiactl as the driver does, open to everybody."""
    folder.mkdir(mode=0o755)
    for name, minor in [(f"nvidia{n}", n) for n in range(count)] + [("nvidiactl", CONTROL)]:
        os.mknod(folder / name, 0o020666, os.makedev(MAJOR, minor))
        (folder / name).chmod(0o666)


def modes(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return owner, group and mode of every node."""
    infos = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (i.st_uid, i.st_gid, i.st_mode) for name, i in infos.items()}


def opened(text: str) -> dict[str, set[str]]:
    """Return error -> names of nodes, of what the probe printed."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        name, equals, said = line.partition("=")
        if equals and name.startswith("nvidia"):
            found.setdefault(said, set()).add(name)
    return found


def programs() -> list[int]:
    """Return the ids of all our programs that the kernel has."""
    found: list[int] = []
    number = 0
    while True:
        try:
            _, answer = bpf.bpf_syscall(NEXT_ID, number.to_bytes(4, "little"))
        except FileNotFoundError:
            return found
        number = int.from_bytes(answer[4:8], "little")
        if bpf.bpf_program_name(number) == bpf.NAME:
            found.append(number)


def programs_beyond(before: Sequence[int], most: int = 0) -> int:
    """Return how many programs there are that were not there before, once these are `most`.

    By their ids, which are never used again. The kernel frees a program a while after its cgroup:
    it is waited for, and one of before may go meanwhile.
    """
    new = set[int]()

    def are_few() -> bool:
        new.clear()
        new.update(set(programs()) - set(before))
        return len(new) <= most

    with contextlib.suppress(GaveUp):
        wait_until(are_few, why="the kernel to free its programs", quiet=60)
    return len(new)


def is_below(pid: int, above: int) -> bool:
    """Return whether a process is another, or descends from it."""
    one: int | None = pid
    while one and one != above:
        one = parent_of(one)
    return one == above


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Let one test at a time count programs: the kernel has one list of them, labs run together."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Service:
    """Cgroups as systemd gives a service, of both versions, with its daemons in them.

    `beside` is another one in which its jobs begin.
    """

    def __init__(self, name: str, *pids: int, beside: Path | None = None) -> None:
        self.name = name
        self.folders = [Path(one.top) / name for one in TREES]
        self.beside = [beside] if beside else []
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(alone())
        try:
            for folder in self.folders:
                folder.mkdir()
                for pid in pids:
                    tree.move_to_cgroup(pid, str(folder))
        except BaseException:  # else the next one waits for this process itself
            self._alone.close()
            raise

    def take_in(self, pid: int) -> None:
        """Let a daemon that was started again be where systemd starts it."""
        for folder in self.folders:
            tree.move_to_cgroup(pid, str(folder))

    def jobs(self) -> list[str]:
        """Return the names of the jobs' cgroups."""
        return sorted(path.name for path in self.places())

    def places(self) -> list[Path]:
        """Return the jobs' cgroups."""
        folders = [*self.folders, *self.beside]
        found = [path for folder in folders for path in folder.glob(f"{PREFIX}*")]
        return [path for path in found if not tree.is_launcher_cgroup(str(path))]

    def launchers(self) -> list[Path]:
        """Return the closed cgroups in which slurmds live."""
        return [path for folder in self.folders for path in folder.glob(f"{LAUNCHER}*")]

    def launcher_programs(self) -> int:
        """Return how many programs keep slurmds closed: two first jobs at once may attach one each.

        They deny the same, and each of them suffices.
        """
        count = 0
        for path in self.launchers():
            group = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            count += len(bpf.attached_program_ids(group))
            os.close(group)
        return count

    def strays(self) -> list[int]:
        """Return who is in a job's cgroup, and not below the process that it is named after."""
        found: list[int] = []
        for path in self.places():
            process = tree.parse_cgroup_name(path.name)
            with contextlib.suppress(OSError):  # it went meanwhile
                members = tree.cgroup_pids(str(path))
                found += [pid for pid in members if process and not is_below(pid, process[0])]
        return found

    def of(self, pid: int) -> list[Path]:
        """Return the cgroups that a process is in."""
        text = Path(f"/proc/{pid}/cgroup").read_text()
        places = tree.parse_cgroup_paths(text)
        return [Path(one.top + places[one.version]) for one in TREES]

    def close(self) -> None:
        """Move the daemons out, and all that lives there; remove the cgroups."""
        with self._alone:
            wait_until(self._removed, why=f"the cgroups of {self.name} to be empty")

    def _removed(self) -> bool:
        """Remove the cgroups; return whether that was possible: somebody may come meanwhile."""
        left: list[Path] = []
        for one, folder in zip_equal(TREES, self.folders):
            for place in (*(path for path in folder.glob("*/") if path.is_dir()), folder):
                for pid in tree.cgroup_pids(str(place)) if place.is_dir() else ():
                    with contextlib.suppress(ProcessLookupError):
                        tree.move_to_cgroup(pid, one.top)
                if not tree.remove_cgroup(str(place)):
                    left.append(place)
        return not left
