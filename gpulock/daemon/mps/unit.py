# SPDX-License-Identifier: Apache-2.0
"""One card's MPS as a transient service of systemd's: start it, ask about it, stop it.

`nvidia-cuda-mps-control -d` goes into the background and starts a server for the user
(docs/facts/nvml.md, mps). All of it is in the cgroup of the service, so systemd ends all of it, as
the user's and not gpulockd's, and gpulockd may end meanwhile. Nothing here waits: what takes time
is a generator that yields for how many seconds it has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.mps.folder import MpsError, read_control_log
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import one_line
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.job.mps import LOG_DIRECTORY, LOGS, PIPE_DIRECTORY, PIPES, mps_folder
from gpulock.node.context import Node
from gpulock.node.devices import Device

TURN: Final = 0.05  # seconds between two looks at a question that is open
START_SECONDS: Final = 12  # from the first program to a server that is there: TimeoutStartSec=
STOP_SECONDS: Final = 5  # TimeoutStopSec=: for `quit`, and again before what is left is killed
MANAGER_SECONDS: Final = 25.0  # for systemd to have done one of these
ENVIRON: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
NOBODY_THERE: Final = (0, 0)
HINT: Final = "SHARE_MPS needs systemd"

T = TypeVar("T")
Steps = Generator[float, None, None]


class MpsPrograms(NamedTuple):
    """The driver's program, and systemd's."""

    control: str = "/usr/bin/nvidia-cuda-mps-control"
    systemd_run: str = "/usr/bin/systemd-run"
    systemctl: str = "/usr/bin/systemctl"


@dataclass
class MpsSite:
    """One card's MPS: whose it is, where, and its daemon once that is known."""

    node: Node
    card: Device
    uid: int
    programs: MpsPrograms = field(default_factory=MpsPrograms)
    control: tuple[int, int] = NOBODY_THERE  # pid, start

    @property
    def folder(self) -> str:
        """Return the card's folder."""
        return mps_folder(self.node.settings.mps_dir, self.card.bus)

    @property
    def unit(self) -> str:
        """Return the name of its service."""
        return f"gpulock-mps-{os.path.basename(self.folder)}.service"

    @property
    def mark(self) -> str:
        """Return what the lock of a place says of it."""
        return f"{self.control[0]} {self.control[1]}"

    def runs(self) -> bool:
        """Return whether its daemon runs."""
        try:
            return self.control != NOBODY_THERE and self.node.proc.running(*self.control)
        except (OSError, ValueError):
            return False


class UnitState(NamedTuple):
    """What systemd says of a service: ActiveState, and MainPID or 0."""

    active: str
    pid: int


def start_words(site: MpsSite) -> list[str]:
    """Return the command that starts the service, and ends once a server is there. Pure."""
    control = site.programs.control
    server = f"echo start_server -uid {site.uid} | {control} >/dev/null"
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
        "CUDA_VISIBLE_DEVICES": site.card.uuid,
        PIPE_DIRECTORY: f"{site.folder}/{PIPES}",
        LOG_DIRECTORY: f"{site.folder}/{LOGS}",
    }
    return [
        *(site.programs.systemd_run, "--quiet", "--collect", f"--unit={site.unit}"),
        *(f"--description=MPS of GPU {site.card.bus}", f"--uid={site.uid}"),
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


def in_background(question: Callable[[], T]) -> Generator[float, None, T]:
    """Return what a thread finds out, at the latest at its own deadline; raise what it raises."""
    asked = BackgroundCall(question)
    while not asked.wait(0.0):
        yield TURN
    return asked.answer()


def start_unit(site: MpsSite) -> Steps:
    """Start the service; raise MpsError or Refusal."""
    begun = clock_boottime()
    try:
        yield from in_background(lambda: run_manager(start_words(site)))
    except MpsError as fault:
        late = clock_boottime() - begun >= START_SECONDS
        said = read_control_log(site.folder)
        why = f"it has no server in {START_SECONDS} s" if late else str(fault)
        raise MpsError(f"{why}{said and f': {said}'}") from None


def find_daemon(site: MpsSite) -> Steps:
    """Learn which process is the daemon of a service that runs; raise MpsError or Refusal."""
    state = yield from in_background(lambda: ask_unit(site))
    if state.active != "active" or not state.pid:
        raise MpsError(f"{site.unit} is {state.active}")
    try:
        site.control = state.pid, site.node.proc.start(state.pid)
    except (OSError, ValueError) as fault:
        raise MpsError(f"its daemon died: {fault}") from None


def stop_unit(site: MpsSite) -> Generator[float, None, str]:
    """Stop the service; return why it has not ended, or nothing. Raises MpsError or Refusal.

    systemctl fails for one that is not loaded, as after its end: its state counts.
    """

    def stop() -> UnitState:
        try:
            run_manager([site.programs.systemctl, "stop", site.unit])
        except MpsError:
            pass
        return ask_unit(site)

    state = yield from in_background(stop)
    return "" if state.active in ("inactive", "failed") else f"{site.unit} is {state.active}"


def ask_unit(site: MpsSite) -> UnitState:
    """Return the state of the service; raise MpsError or Refusal. It waits for systemd."""
    words = ["show", "--property=ActiveState", "--property=MainPID", site.unit]
    said = run_manager([site.programs.systemctl, *words])
    pairs = dict(line.split("=", 1) for line in said.split("\n") if "=" in line)
    pid = pairs.get("MainPID", "")
    return UnitState(pairs.get("ActiveState", "unknown"), int(pid) if pid.isdecimal() else 0)
