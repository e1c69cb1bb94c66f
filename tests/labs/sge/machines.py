# SPDX-License-Identifier: Apache-2.0
"""Machines made of namespaces: own network, host name and mounts on one kernel, one /proc.

A machine is one process (`sleep infinity`) that keeps its namespaces alive. Inside them `/run` is
a tmpfs, `/etc` and `/var/lib` are copies, so that users, host names and gpulock's own folders
exist there and nowhere else: the host's files, mounts, users and links are never touched. What
belongs to a lab is known by the source of that tmpfs in the process's own mountinfo, so that a
lab whose `up` was cut short is found and ended without any state file.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.wait import LabError, wait_until

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# TEST-NET-2 (RFC 5737): an address nobody has; the namespaces have no route out of it anyway.
NETWORK: Final = "198.51.100."

# "$1" the machine's folder, "$2" its name, "$3" the tmpfs source that marks it; then the folders
# of the host's that are empty on it.
_BOOT: Final = r"""
set -eu
mount -t tmpfs "$3" "$1/over"
mkdir "$1/over/var"
for tree in etc var/lib; do
    cp -a "/$tree" "$1/over/$tree"
done
cp -a "$1/etc/." "$1/over/etc"
for tree in etc var/lib; do mount --bind "$1/over/$tree" "/$tree"; done
mount -t tmpfs -o mode=755 "$3" /run
mkdir -m 755 /run/gpulock /run/gpulock.claims /run/lock /var/lib/gpulock /etc/gpulock
mkdir -m 1777 /run/tmp
mount -t tmpfs -o mode=755 "$3" /run/gpulock
mount --bind "$1/state" /var/lib/gpulock
mkdir -p /usr/lib/gpulock
mount -t tmpfs -o mode=755 "$3" /usr/lib/gpulock
mount --bind "$1/conf" /etc/gpulock
hostname "$2"
ip link set lo up
if [ -d "$1/bin" ]; then # programs for the PATH of jobs
    mount -t overlay "$3" -o "lowerdir=$1/bin:/usr/local/bin" /usr/local/bin
fi
mark=$3
shift 3
for hidden; do mount -t tmpfs -o mode=755 "$mark" "$hidden"; done
echo ready
exec sleep infinity >/dev/null 2>&1
"""


@dataclass(frozen=True)
class User:
    """An ordinary user who exists on the lab's machines only."""

    name: str
    uid: int
    home: Path


@dataclass(frozen=True)
class Machine:
    """One machine of a lab, whether it is up or not."""

    name: str
    number: int
    lab: Path

    @property
    def folder(self) -> Path:
        """Where the machine keeps what outlives its namespaces."""
        return self.lab / "machines" / self.name

    @property
    def address(self) -> str:
        """The machine's only address besides its loopback."""
        return f"{NETWORK}{self.number}"

    @property
    def pid(self) -> int:
        """The process that holds the namespaces; 0 when the machine is down."""
        try:
            pid = int((self.folder / "pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if _mark_of(pid) == self._mark else 0

    @property
    def _mark(self) -> str:
        return f"{mark(self.lab)}:{self.name}"

    def path(self, inside: str) -> Path:
        """Where the host sees a path of this machine."""
        return Path(f"/proc/{self.pid or self._down()}/root{inside}")

    def enter(self, *, uid: int = 0, cwd: str = "/") -> list[str]:
        """Return the command line that runs what follows it on this machine."""
        target = str(self.pid or self._down())
        ids = [] if uid == 0 else [f"--setuid={uid}", f"--setgid={uid}"]
        return ["nsenter", "-t", target, "-m", "-u", "-n", "-r", *ids, f"--wdns={cwd}", "--"]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        uid: int = 0,
        cwd: str = "/",
        stdin: str | None = None,
        seconds: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here with exactly the environment given (and a PATH), captured."""
        line = [*self.enter(uid=uid, cwd=cwd), *command]
        try:
            return subprocess.run(
                line,
                env={"PATH": PATH, **(env or {})},
                input="" if stdin is None else stdin,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            said = f"{late.stdout!r} {late.stderr!r}"
            raise LabError(f"{self.name}: {list(command)} ran over {seconds:g} s: {said}") from late

    def boot(
        self,
        users: Sequence[User],
        others: Sequence[Machine],
        services: str,
        hidden: Sequence[str] = (),
    ) -> None:
        """Make the namespaces; the machine knows the users and `others` by name.

        Folders in `hidden` are empty there.
        """
        for name in ("state", "conf", "over", "etc"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        _write_etc(self.folder / "etc", users, others, services)
        with (self.folder / "boot.log").open("w") as log:
            namespaces = ["unshare", "-m", "-u", "-n", "--propagation", "private"]
            words = [str(self.folder), self.name, self._mark, *hidden]
            script = ["sh", "-c", _BOOT, "gpulock-lab", *words]
            holder = subprocess.Popen(
                [*namespaces, *script],
                env={"PATH": PATH},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        (self.folder / "pid").write_text(str(holder.pid))
        stdout = holder.stdout
        assert stdout is not None
        with stdout:
            wait_until(
                lambda: bool(select.select([stdout], [], [], 0.2)[0]), why=f"{self.name} to boot"
            )
            if stdout.readline() != b"ready\n":
                reason = (self.folder / "boot.log").read_text()
                raise LabError(f"machine {self.name} did not boot:\n{reason}")
        # The lab outlives the process that brought it up: init or the next `down` reaps it.
        holder.returncode = 0

    def _down(self) -> int:
        raise LabError(f"machine {self.name} of {self.lab} is not up")


def connect(switch: Machine, others: Sequence[Machine]) -> None:
    """Join the machines by a bridge that lives in the first one's namespace."""
    lines = ["link add gl0 type bridge forward_delay 0", "link set gl0 up"]
    lines.append(f"addr add {switch.address}/24 dev gl0")
    for other in others:
        port = f"gl{other.number}"
        lines.append(f"link add {port} type veth peer name eth0 netns {other.pid}")
        lines.append(f"link set {port} master gl0 up")
    _ip(switch, lines)
    for other in others:
        _ip(other, [f"addr add {other.address}/24 dev eth0", "link set eth0 up"])


def mark(lab: Path) -> str:
    """Return what every mount of a lab has as its source."""
    return f"gpulock-lab:{lab}"


def processes(lab: Path, among: Sequence[int] | None = None) -> dict[int, str]:
    """Return the processes that live in the lab's namespaces, with their names."""
    found: dict[int, str] = {}
    if among is None:
        among = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    for pid in among:
        if _mark_of(pid).startswith(f"{mark(lab)}:"):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return found


def end_processes(lab: Path) -> None:
    """Kill what lives in the lab's namespaces, and with its last process each namespace ends."""

    def none_left() -> bool:
        left = processes(lab)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return not left

    wait_until(none_left, why=lambda: f"the lab's processes to end\n{processes(lab)!s}")


def _mark_of(pid: int) -> str:
    """Return the source of a process's /run, which names its lab and machine."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return ""
    found = re.search(r" /run [^\n]* - tmpfs (gpulock-lab:\S+) ", text)
    return found[1] if found else ""


def _ip(machine: Machine, lines: Sequence[str]) -> None:
    done = machine.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
    if done.returncode != 0:
        raise LabError(f"{machine.name}: ip failed: {done.stderr}")


def _write_etc(etc: Path, users: Sequence[User], known: Sequence[Machine], services: str) -> None:
    """Write what differs from the host's /etc: names of users, machines and ports."""
    host = Path("/etc")
    hosts = "".join(f"{machine.address} {machine.name}\n" for machine in known)
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (etc / "nsswitch.conf").write_text(
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\n"
    )
    (etc / "resolv.conf").write_text("")
    (etc / "services").write_text((host / "services").read_text() + services)
    passwd = "".join(f"{u.name}:x:{u.uid}:{u.uid}::{u.home}:/bin/bash\n" for u in users)
    group = "".join(f"{u.name}:x:{u.uid}:\n" for u in users)
    shadow = "".join(f"{u.name}:*:19000:0:99999:7:::\n" for u in users)
    (etc / "passwd").write_text((host / "passwd").read_text() + passwd)
    (etc / "group").write_text((host / "group").read_text() + group)
    (etc / "shadow").touch(mode=0o640)
    (etc / "shadow").write_text((host / "shadow").read_text() + shadow)
