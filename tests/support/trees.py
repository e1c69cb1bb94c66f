# SPDX-License-Identifier: Apache-2.0
"""A fake /proc, and a node of its own on it: what the unit tests of the core play on.

Everything is real files below tmp_path. A process is a folder that a test writes and removes, so
that it is at one syscall what the test says, whatever else runs on this machine.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from typing_extensions import Unpack

from gpulock.alloc.liveness import Judge
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import boot
from gpulock.store.owner import Owner

BOOT = "11111111-1111-1111-1111-111111111111"
OTHER_BOOT = "22222222-2222-2222-2222-222222222222"
HOST_NS = "pid:[4026531836]"
NAME = "node1"
INIT, EXECD = 1, 50
DAEMONS = ("sge_execd", "sge_shepherd", "slurmd", "slurmd-wlm", "slurmstepd", "slurmstepd-wlm")


class About(TypedDict, total=False):
    """What there is to say of a process; `threads` are (tid, state), the leader by itself."""

    state: str
    ppid: int
    session: int
    start: int
    uids: Iterable[int]
    groups: Iterable[int]
    threads: Mapping[int, str]
    fds: Mapping[int, Path]
    cwd: Path
    exe: str
    told_session: bool


class FakeProc:
    """A process tree at `root` that looks like /proc; a scheduler's daemon runs its own program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "self/ns").mkdir(parents=True)
        self.boot(BOOT)
        self.namespace(HOST_NS)
        self.add(INIT, "systemd", ppid=0)

    def boot(self, boot_id: str) -> None:
        """Boot the machine."""
        (self.root / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")

    def namespace(self, name: str) -> None:
        """Enter another pid namespace."""
        link = self.root / "self/ns/pid"
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def add(self, pid: int, name: str = "sh", **about: Unpack[About]) -> int:
        """Let a process be; return its pid. Another of that pid is gone."""
        folder = self.root / str(pid)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "fd").mkdir(parents=True)
        state, ppid = about.get("state", "S"), about.get("ppid", INIT)
        sid, start = about.get("session", pid), about.get("start", 1000)
        (folder / "stat").write_bytes(stat_line(pid, name, state, ppid, sid, start))
        uids, groups = about.get("uids", (1000,) * 4), about.get("groups", ())
        (folder / "status").write_bytes(status_text(name, state, ppid, tuple(uids), tuple(groups)))
        (folder / "environ").touch()
        if about.get("told_session", True):
            with (folder / "status").open("ab") as file:
                file.write(b"NSsid:\t%d\n" % sid)
        for tid, letter in about.get("threads", {pid: state}).items():
            (folder / "task" / str(tid) / "fd").mkdir(parents=True)
            line = stat_line(tid, name, letter, ppid, sid, start)
            (folder / "task" / str(tid) / "stat").write_bytes(line)
        for fd, target in about.get("fds", {}).items():
            (folder / "fd" / str(fd)).symlink_to(target)
        program = f"/usr/sbin/{name}" if name in DAEMONS else ""
        for link, place in (("cwd", about.get("cwd")), ("exe", about.get("exe", program))):
            if place:
                (folder / link).symlink_to(str(place))
        return pid

    def remove(self, pid: int) -> None:
        """Let a process be gone."""
        shutil.rmtree(self.root / str(pid))

    def execd(self, cwd: Path) -> int:
        """Let an execd run, in its spool directory."""
        return self.add(EXECD, "sge_execd", uids=(0, 104, 0, 104), cwd=cwd)

    def shepherd(self, pid: int, cwd: Path, *, start: int = 1000, uid: int = 0) -> int:
        """Let a shepherd run in a spool directory."""
        uids = (uid, os.geteuid(), uid, os.geteuid())
        return self.add(pid, "sge_shepherd", ppid=EXECD, start=start, uids=uids, cwd=cwd)


def stat_line(pid: int, name: str, state: str, ppid: int, session: int, start: int) -> bytes:
    """Return a line of /proc/PID/stat (proc(5)): 52 fields, the second in parentheses."""
    rest = [0] * 50
    rest[1], rest[3], rest[19] = ppid, session, start
    rest[24], rest[47], rest[48] = 0x400000, 0x7FFE0000, 0x7FFE0000  # end of code; no environment
    words = [state, *map(str, rest[1:])]
    return b"%d (%s) %s\n" % (pid, os.fsencode(name), " ".join(words).encode())


def status_text(
    name: str, state: str, ppid: int, uids: tuple[int, ...], groups: tuple[int, ...]
) -> bytes:
    """Return /proc/PID/status as the kernel writes it, cut to what counts."""
    escaped = os.fsencode(name).replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    lines = [
        b"Name:\t" + escaped,
        b"State:\t%s (of some kind)" % state.encode(),
        b"PPid:\t%d" % ppid,
        b"Uid:\t" + b"\t".join(b"%d" % uid for uid in uids),
        b"Gid:\t0\t0\t0\t0",
        b"Groups:\t" + b" ".join(b"%d" % gid for gid in groups) + b" ",
        b"VmSize:\t    1000 kB",
    ]
    return b"\n".join(lines) + b"\n"


def information(bus: str, minor: int, uuid: str = "", **other: str) -> str:
    """Return what the driver shows of one GPU."""
    known = uuid or f"GPU-{minor:08d}-aaaa"
    fields = {
        "Model": "Tesla V100",
        "GPU UUID": known,
        "Bus Location": bus,
        "Device Minor": str(minor),
        "GPU Excluded": "No",
        **other,
    }
    return "".join(f"{key}: \t {value}\n" for key, value in fields.items())


class Box:
    """A node with GPUs, a fake /proc, a driver, LOCK_DIR and STATE_DIR below one folder."""

    def __init__(self, root: Path, gpus: int = 4, **keys: str) -> None:
        self.root = root
        self.proc = FakeProc(root / "proc")
        self.driver = root / "driver"
        self.dev = root / "dev"
        self.state = root / "state"
        self.lock = root / "run"
        self.records = root / "run.claims"
        for folder in (self.driver / "gpus", self.dev, self.state):
            folder.mkdir(parents=True)
        (self.dev / "kmsg").touch()
        self.settings = {
            "LOCK_DIR": str(self.lock),
            "STATE_DIR": str(self.state),
            "PROC_ROOT": str(self.proc.root),
            "DRIVER_ROOT": str(self.driver),
            "SYS_ROOT": str(root / "sys"),
            "DEV_ROOT": str(self.dev),
            **keys,
        }
        for number in range(gpus):
            self.gpu(bus(number), number)

    def gpu(self, name: str, minor: int, uuid: str = "", **other: str) -> Path:
        """Put a GPU in; return the driver's file of it."""
        folder = self.driver / "gpus" / name
        folder.mkdir(exist_ok=True)
        (folder / "information").write_text(information(name, minor, uuid, **other))
        (self.dev / f"nvidia{minor}").touch()
        return folder / "information"

    def node(self) -> Node:
        """Return the node as a program that starts now sees it."""
        return Node(Settings(dict(self.settings)), NAME)

    def config(self, **more: str) -> str:
        """Write the settings to a file of a simulated node; return its path."""
        marker = self.root / "marker"
        marker.write_text("gpulock-simulation 1\n")
        path = self.root / "gpulock.conf"
        pairs = {**self.settings, "SIMULATION": str(marker), **more}
        path.write_text("".join(f"{key}={value}\n" for key, value in pairs.items()))
        return str(path)

    def inventory(self, *lines: str, boot_id: str = BOOT) -> None:
        """Publish what NVML tells."""
        self.lock.mkdir(exist_ok=True)
        text = "\n".join(["gpulock-inventory 1", f"boot_id={boot_id}", *lines])
        (self.lock / "inventory").write_text(text + "\n")

    def locks(self) -> list[str]:
        """Return the ids that are locked."""
        folder = self.lock / "locks"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def bus(number: int) -> str:
    """Return the bus id of the GPU with that index in a Box."""
    return f"0000:{number + 1:02x}:00.0"


def record(**changes: object) -> Owner:
    """Return a record of a Grid Engine job of this boot; the shepherd is pid 500."""
    fields: dict[str, object] = {
        "scheduler": "sge",
        "cluster": "default",
        "node": NAME,
        "job_id": "12",
        "task_id": "",
        "pid": 500,
        "start": 1000,
        "user": "alice",
        "uid": 1000,
        "queue": "gpu.q",
        "add_grp_id": 65400,
        "boot_id": BOOT,
        "namespaces": HOST_NS,
        "token": "feedfacefeedface",
        "devices": (bus(0),),
        **changes,
    }
    return Owner(**fields)


def judge_of(node: Node) -> Judge:
    """Return a judge with all rules that takes one look at /proc when first asked."""
    return make_liveness_judge(node)


def judging(node: Node) -> Callable[[], Judge]:
    """Return what `claim` is given to make its judge with."""
    return lambda: judge_of(node)


def soon() -> Deadline:
    """Return a deadline no test should come near to."""
    return Deadline(10)


def box_with_shepherd(root: Path) -> Box:
    """Return a node with an execd, and a shepherd below it."""
    made = Box(root)
    made.proc.execd(root)
    made.proc.shepherd(500, root)
    return made


def box_at_work(root: Path, **keys: str) -> Box:
    """Return a node with an execd, at work since this boot."""
    made = Box(root, 4, **keys)
    made.proc.execd(root)
    node = made.node()
    node.store.check(make=True)
    boot.begin_boot(node.store, str(made.state), BOOT, NAME)
    return made


@contextmanager
def public_place() -> Generator[Path]:
    """Give a folder that others may enter: pytest keeps its own to its user."""
    with tempfile.TemporaryDirectory(prefix="gpulock-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def let_others_in(folder: Path) -> None:
    """Let other users enter a folder: pytest keeps its own to its user."""
    for place in (folder, *folder.parents):
        if not place.stat().st_mode & stat.S_IXOTH:
            place.chmod(0o755)
