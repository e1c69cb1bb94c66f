# SPDX-License-Identifier: Apache-2.0
"""One card's MPS as a transient service of systemd's: start it, ask about it, stop it.

`nvidia-cuda-mps-control -d` goes into the background and starts a server for the user
(docs/facts/nvml.md, mps). All of it is in the cgroup of the service, so systemd ends all of it, as
the user's and not gpulockd's, and gpulockd may end meanwhile. What is here waits for systemd: a
thread asks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

from gpulock.daemon.mps.folder import MpsError, read_control_log
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import one_line
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.job.mps import LOG_DIRECTORY, LOGS, PIPE_DIRECTORY, PIPES

START_SECONDS: Final = 12  # from the first program to a server that is there: TimeoutStartSec=
STOP_SECONDS: Final = 5  # TimeoutStopSec=: for `quit`, and again before what is left is killed
MANAGER_SECONDS: Final = 25.0  # for systemd to have done one of these
ENVIRON: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
HINT: Final = "SHARE_MPS needs systemd"


class MpsPrograms(NamedTuple):
    """The driver's program, and systemd's."""

    control: str = "/usr/bin/nvidia-cuda-mps-control"
    systemd_run: str = "/usr/bin/systemd-run"
    systemctl: str = "/usr/bin/systemctl"


class MpsUnit(NamedTuple):
    """The service of a card (`bus`, `uuid`) for a user; `folder` is the card's."""

    programs: MpsPrograms
    bus: str
    uuid: str
    uid: int
    folder: str

    @property
    def name(self) -> str:
        """Return what systemd calls it."""
        return f"gpulock-mps-{os.path.basename(self.folder)}.service"

    def start(self) -> None:
        """Start it, and return once a server is there; raise MpsError or Refusal."""
        begun = clock_boottime()
        try:
            run_manager(start_words(self))
        except MpsError as fault:
            late = clock_boottime() - begun >= START_SECONDS
            said = read_control_log(self.folder)
            why = f"it has no server in {START_SECONDS} s" if late else str(fault)
            raise MpsError(f"{why}{said and f': {said}'}") from None

    def find_daemon(self) -> int:
        """Return the pid of its daemon; raise MpsError or Refusal where it does not run."""
        active, pid = self._ask()
        if active != "active" or not pid:
            raise MpsError(f"{self.name} is {active}")
        return pid

    def stop(self) -> str:
        """Stop it; return why it has not ended, or nothing. Raises MpsError or Refusal.

        systemctl fails for one that is not loaded, as after its end: its state counts.
        """
        with suppress(MpsError):
            run_manager([self.programs.systemctl, "stop", self.name])
        active, _ = self._ask()
        return "" if active in ("inactive", "failed") else f"{self.name} is {active}"

    def _ask(self) -> tuple[str, int]:
        """Return what systemd says: ActiveState, and MainPID or 0."""
        words = ["show", "--property=ActiveState", "--property=MainPID", self.name]
        said = run_manager([self.programs.systemctl, *words])
        pairs = dict(line.split("=", 1) for line in said.split("\n") if "=" in line)
        pid = pairs.get("MainPID", "")
        return pairs.get("ActiveState", "unknown"), int(pid) if pid.isdecimal() else 0


def start_words(unit: MpsUnit) -> list[str]:
    """Return the command that starts the service, and ends once a server is there. Pure."""
    control = unit.programs.control
    server = f"echo start_server -uid {unit.uid} | {control} >/dev/null"
    there = f"echo get_server_list | {control} | grep -q '[0-9]'"
    properties = {
        "Type": "forking",
        "TimeoutStartSec": START_SECONDS,
        "TimeoutStopSec": STOP_SECONDS,
        "ExecStartPost": f'/bin/sh -c "{server}; until {there}; do sleep 0.1; done"',
        "ExecStop": f'/bin/sh -c "echo quit | {control}"',
    }
    environ = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": unit.uuid,
        PIPE_DIRECTORY: f"{unit.folder}/{PIPES}",
        LOG_DIRECTORY: f"{unit.folder}/{LOGS}",
    }
    return [
        *(unit.programs.systemd_run, "--quiet", "--collect", f"--unit={unit.name}"),
        *(f"--description=MPS of GPU {unit.bus}", f"--uid={unit.uid}"),
        *(f"--property={name}={value}" for name, value in properties.items()),
        *(f"--setenv={name}={value}" for name, value in environ.items()),
        *(control, "-d"),
    ]


def run_manager(words: list[str]) -> str:
    """Return what a program of systemd's prints; raise MpsError with its words, or Refusal."""
    program = SchedulerProgram(words[0], ENVIRON, HINT)
    code, output = program.answer(words[1:], Deadline(MANAGER_SECONDS))
    said = output.decode("utf-8", "replace").strip()
    if code:
        raise MpsError(f"{program.name} ended with {code}: {one_line(said)[-200:]}")
    return said
