# SPDX-License-Identifier: Apache-2.0
"""Device nodes without a driver, and what the kernel says to who opens them.

ENXIO: it may, and there is no driver. EPERM: its cgroup may not. EACCES: the node's mode says no.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpulock.isolation import bpf, tree
from gpulock.isolation.tree import LAUNCHER, PREFIX
from gpulock.node.devices import MAJOR
from tests.labs.common.processes import parent_of
from tests.support.wait import wait_until

CONTROL = 255  # nvidiactl
TOP = tree.find_cgroup_top("/sys")
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


def programs() -> set[int]:
    """Return the ids of our programs that cgroups here have, or processes that are seen from here.

    The kernel's own list is that of all labs on a machine.
    """
    found = set[int]()
    for folder, _, _ in os.walk(TOP):
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            found |= attached_to(Path(folder))
    for place in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):
            _, is_program, number = place.read_text().partition("\nprog_id:\t")
            if is_program and bpf.bpf_program_name(int(number.split()[0])) == bpf.PROGRAM_NAME:
                found.add(int(number.split()[0]))
    return found


def attached_to(folder: Path) -> set[int]:
    """Return the ids of our programs that a cgroup has."""
    group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return {*bpf.attached_program_ids(group)}
    finally:
        os.close(group)


def is_below(pid: int, above: int) -> bool:
    """Return whether a process is another, or descends from it."""
    one: int | None = pid
    while one and one != above:
        one = parent_of(one)
    return one == above


class Service:
    """A cgroup as systemd gives a service, with its daemons in it.

    `beside` is another one in which its jobs begin.
    """

    def __init__(self, name: str, *pids: int, beside: Path | None = None) -> None:
        self.name = name
        self.folder = Path(TOP) / name
        self.beside = [beside] if beside else []
        self.folder.mkdir()
        for pid in pids:
            self.take_in(pid)

    def take_in(self, pid: int) -> None:
        """Let a daemon that was started again be where systemd starts it."""
        tree.move_to_cgroup(pid, str(self.folder))

    def jobs(self) -> list[str]:
        """Return the names of the jobs' cgroups."""
        return sorted(path.name for path in self.places())

    def places(self) -> list[Path]:
        """Return the jobs' cgroups."""
        folders = [self.folder, *self.beside]
        found = [path for folder in folders for path in folder.glob(f"{PREFIX}*")]
        return [path for path in found if not tree.is_launcher_cgroup(str(path))]

    def launcher_programs(self) -> set[int]:
        """Return what keeps slurmds closed, each in its cgroup: two first jobs may attach one each.

        They deny the same, and each of them suffices.
        """
        return {number for path in self.folder.glob(f"{LAUNCHER}*") for number in attached_to(path)}

    def strays(self) -> list[int]:
        """Return who is in a job's cgroup, and not below the process that it is named after."""
        found: list[int] = []
        for path in self.places():
            process = tree.parse_cgroup_name(path.name)
            with contextlib.suppress(OSError):  # it went meanwhile
                members = tree.cgroup_pids(str(path))
                found += [pid for pid in members if process and not is_below(pid, process[0])]
        return found

    def close(self) -> None:
        """Move the daemons out, and all that lives there; remove the cgroups."""
        wait_until(self._removed, why=f"the cgroups of {self.name} to be empty")

    def _removed(self) -> bool:
        """Remove the cgroups; return whether that was possible: somebody may come meanwhile."""
        left: list[Path] = []
        for place in (*(path for path in self.folder.glob("*/") if path.is_dir()), self.folder):
            for pid in tree.cgroup_pids(str(place)) if place.is_dir() else ():
                with contextlib.suppress(ProcessLookupError):
                    tree.move_to_cgroup(pid, TOP)
            if not tree.remove_cgroup(str(place)):
                left.append(place)
        return not left
