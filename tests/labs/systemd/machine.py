# SPDX-License-Identifier: Apache-2.0
"""A machine with a real systemd as its PID 1, in namespaces, on this machine's own file system.

What it writes goes into memory and is gone with it. Its cgroups are below one of ours in every
hierarchy, made by `up` and removed by `down`. Nothing of the host is mounted for writing but the
cgroups and the folder of the lab.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.labs.common.processes import remove_cgroups
from tests.support.evidence import unwatch, watch
from tests.support.wait import LabError, wait_exit, wait_until

DEFAULT_LAB: Final = "/tmp/gpulock-lab-systemd"
BOOT: Final = Path(__file__).with_name("boot.sh")
CGROUPS: Final = Path("/sys/fs/cgroup")
V1: Final = ("systemd", "devices", "memory", "pids", "cpu", "cpuacct", "freezer", "blkio")
POWER_OFF: Final = signal.SIGRTMIN + 4  # systemd(1): starts poweroff.target
ENV: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
NAMESPACES: Final = ("--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup")
# Or a command's own cgroup, which slurmd and hooks read, would be one above the machine's top.
_JOIN: Final = 'mkdir -p $0 && echo 0 >$0/cgroup.procs && exec "$@"'


class Machine:
    """One machine; `binds` are folders of the host that it sees, by their path inside."""

    def __init__(
        self,
        mode: str = "hybrid",
        *,
        binds: Mapping[Path, str] | None = None,
        lab: str = DEFAULT_LAB,
    ) -> None:
        self.lab = Path(lab)
        self.mode = mode
        self.binds = dict(binds or {})
        self._name = f"gpulock-lab-{self.lab.name}"
        self._holder: subprocess.Popen[bytes] | None = None
        self.pid = 0

    # --- up and down --------------------------------------------------------------------------

    def up(self) -> None:
        """Boot, and wait until systemd has started what it starts."""
        self.lab.mkdir(mode=0o755, parents=True)
        watch(self)
        for name in ("root", "over"):
            (self.lab / name).mkdir()
        groups = [top / self._name for top in hierarchies(self.mode)]
        for group in groups:
            group.mkdir(exist_ok=True)
        enter = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
        pairs = [f"{source}:{target}" for source, target in self.binds.items()]
        script = f'{enter} && exec setsid unshare --fork --kill-child=SIGKILL "$@"'
        words = [*NAMESPACES, "--propagation=private"]
        boot = [str(BOOT), str(self.lab), self.mode, *pairs]
        with (self.lab / "log").open("wb") as log:
            self._holder = subprocess.Popen(
                ["bash", "-c", script, "gpulock-lab", *words, *boot],
                env=ENV,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._booted, why="systemd to be up")
        except BaseException:
            self.down()
            raise

    @property
    def name(self) -> str:
        """Return the lab's name."""
        return self.lab.name

    def log_files(self) -> list[Path]:
        """Return what systemd says before there is a journal."""
        return [self.lab / "log"]

    def evidence(self) -> dict[str, str]:
        """Return the end of the journal, what runs or has failed, and who holds what."""
        commands = (
            ("journal", "journalctl --no-pager -n 60"),
            ("units", "systemctl --no-pager list-units --all *.service *.socket *.slice"),
            ("locks", "grep -r . /run/gpulock/locks"),
            ("slurm", "squeue --all"),
            ("nodes", "sinfo -N -l"),
            ("slurm-logs", "tail -n 25 /srv/slurm/log/slurmctld /srv/slurm/log/slurmd"),
        )
        done = {name: self.run(*line.split(), check=False) for name, line in commands}
        return {name: one.stdout + one.stderr for name, one in done.items()}

    def down(self) -> None:
        """Power off, and take away what is left of this lab."""
        unwatch(self)
        if init := self.pid or self._find():
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, POWER_OFF)
            try:
                wait_until(lambda: not Path(f"/proc/{init}").exists(), why="power off", quiet=20)
            except LabError:
                os.kill(init, signal.SIGKILL)
        if self._holder is not None:
            self._holder.kill()  # that of a machine which did not boot waits for it
            wait_exit(self._holder, why="the holder of the namespaces to end")
        self._holder, self.pid = None, 0
        remove_cgroups(self._groups)
        shutil.rmtree(self.lab)

    def _booted(self) -> bool:
        holder = self._holder
        assert holder is not None
        if holder.poll() is not None:
            raise LabError(f"systemd did not boot: {self._log()}")
        self.pid = self._find()
        if not self.pid:
            return False
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def _find(self) -> int:
        """Return our PID 1 as the host sees it, 0 while it is not systemd yet."""
        holder = self._holder.pid if self._holder else 0
        try:
            children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
            name = Path(f"/proc/{children[0]}/comm").read_text().strip()
        except (OSError, IndexError):
            return 0
        return int(children[0]) if name == "systemd" else 0

    def _groups(self) -> list[Path]:
        places = [top / self._name for top in hierarchies("hybrid")]
        return [place for place in places if place.is_dir()]

    def _log(self) -> str:
        log = self.lab / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""

    # --- commands -----------------------------------------------------------------------------

    def path(self, inside: str) -> Path:
        """Where this process finds a path of the machine."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def enter(self) -> list[str]:
        """Return what begins a command line that runs as root on the machine."""
        line = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        return [*line, "sh", "-c", _JOIN, "/sys/fs/cgroup/lab"] if self.mode == "unified" else line

    def run(
        self, *command: str | Path, check: bool = True, seconds: float = 300.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the machine; raise LabError where it fails."""
        done = subprocess.run(
            [*self.enter(), *map(str, command)],
            env=ENV,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        if check and done.returncode != 0:
            said = f"{done.stdout}{done.stderr}"
            raise LabError(f"{command} ended with {done.returncode}: {said}")
        return done

    def show(self, unit: str, name: str) -> str:
        """Return what systemd goes by for a property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={name}", "--value").stdout.strip()

    def journal(self, unit: str) -> list[str]:
        """Return the lines of a unit's journal, as `journalctl -o cat` shows them."""
        return self.run("journalctl", "-u", unit, "-o", "cat", "--no-pager").stdout.splitlines()

    def write(self, inside: str, text: str) -> None:
        """Write a file on the machine."""
        self.run("install", "-D", "-m", "644", "/dev/stdin", inside, stdin=text)


def hierarchies(mode: str) -> list[Path]:
    """Return the cgroup hierarchies of the host that a machine of a mode uses."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    v1 = [CGROUPS / name for name in V1 if (CGROUPS / name).is_dir()]
    return [CGROUPS / "unified", *(v1 if mode == "hybrid" else [])]
