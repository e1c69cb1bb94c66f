# SPDX-License-Identifier: Apache-2.0
"""One card's MPS as a transient service of systemd's: start it, ask about it, stop it.

`nvidia-cuda-mps-control -d` goes into the background and starts a server for the user
(docs/facts/nvml.md, mps). All of it is in the cgroup of the service, so systemd ends all of it, as
the user's and not gpulockd's, and gpulockd may end meanwhile. MpsUnit waits for systemd: a thread
asks.

STATE_DIR-mps has a folder for each card that has an MPS, with pipes and logs that are its user's.
It and the folder of a card are root's, so that the user cannot put a link in the place of `pipe` or
`log`. What the user has made in there is removed by rm(1), which follows no link.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Final, NamedTuple

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, Refusal, one_line
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.job.mps import LINE, LOG_DIRECTORY, LOGS, PIPE_DIRECTORY, PIPES, SERVER
from gpulock.store import atomic, kv

BIN = "/usr/bin"
CONTROL, RUN, CTL = PROGRAMS = ("nvidia-cuda-mps-control", "systemd-run", "systemctl")
START_SECONDS: Final = 12  # from the first program to a server that is there: TimeoutStartSec=
STOP_SECONDS: Final = 5  # TimeoutStopSec=: for `quit`, and again before what is left is killed
MANAGER_SECONDS: Final = 25.0  # for systemd to have done one of these
ENVIRON: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
GONE: Final = ".gone."  # begins the name of a folder that is being removed
HINT: Final = "SHARE_MPS needs systemd"


class MpsUnit(NamedTuple):
    """The service of a card (`bus`, `uuid`) for a user; `folder` is the card's."""

    bus: str
    uuid: str
    uid: int
    folder: str

    @property
    def name(self) -> str:
        """Return what systemd calls it."""
        return f"gpulock-mps-{os.path.basename(self.folder)}.service"

    def start(self) -> None:
        """Start it, and return once a server is there; raise Refusal."""
        try:
            run_manager(start_words(self))
        except Refusal as fault:
            fault.why += f": {said}" if (said := read_control_log(self.folder)) else ""
            raise

    def find_daemon(self) -> int:
        """Return the pid of its daemon; raise Refusal where it does not run."""
        active, pid = self._ask()
        if active != "active" or not pid:
            raise Refusal(BROKEN, f"{self.name} is {active}", f"see systemctl status {self.name}")
        return pid

    def stop(self) -> str:
        """Stop it; return why it has not ended, or nothing. Raises Refusal.

        systemctl fails for one that is not loaded, as after its end: its state counts.
        """
        with suppress(Refusal):
            run_manager([CTL, "stop", self.name])
        active, _ = self._ask()
        return "" if active in ("inactive", "failed") else f"{self.name} is {active}"

    def _ask(self) -> tuple[str, int]:
        """Return what systemd says: ActiveState, and MainPID or 0."""
        words = ["show", "--property=ActiveState", "--property=MainPID", self.name]
        said = run_manager([CTL, *words])
        pairs = dict(line.split("=", 1) for line in said.split("\n") if "=" in line)
        pid = pairs.get("MainPID", "")
        return pairs.get("ActiveState", "unknown"), int(pid) if pid.isdecimal() else 0


def start_words(unit: MpsUnit) -> list[str]:
    """Return the command that starts the service, and ends once a server is there. Pure."""
    control = f"{BIN}/{CONTROL}"
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
        *(RUN, "--quiet", "--collect", f"--unit={unit.name}"),
        *(f"--description=MPS of GPU {unit.bus}", f"--uid={unit.uid}"),
        *(f"--property={name}={value}" for name, value in properties.items()),
        *(f"--setenv={name}={value}" for name, value in environ.items()),
        *(control, "-d"),
    ]


def run_manager(words: list[str]) -> str:
    """Return what a program of systemd's prints; raise Refusal."""
    program = SchedulerProgram(f"{BIN}/{words[0]}", ENVIRON, HINT)
    return program.read(words[1:], Deadline(MANAGER_SECONDS))


def make_card_folder(folder: str, uid: int, boot_id: str) -> None:
    """Make the folder of one card's MPS, with the user's own inside; raise OSError.

    The note of whose it is comes first: from then on the card is closed to others.
    """
    atomic.mkdir_if_missing(os.path.dirname(folder))
    os.mkdir(folder, 0o755)
    write_server_note(folder, uid, boot_id)
    for name in (PIPES, LOGS):
        os.mkdir(f"{folder}/{name}", 0o700)
        if os.geteuid() != uid:
            os.chown(f"{folder}/{name}", uid, -1)


def write_server_note(folder: str, uid: int, boot_id: str) -> None:
    """Note whose the MPS of a card is; raise OSError."""
    pairs = [("uid", str(uid)), ("boot_id", boot_id)]
    atomic.replace_file(f"{folder}/{SERVER}", f"{LINE}\n{kv.encode_pairs(pairs)}".encode())


def list_card_folders(mps_dir: str) -> list[str]:
    """Return the folders of cards, and remove what was being removed."""
    try:
        names = sorted(os.listdir(mps_dir))
    except OSError:
        return []
    start_removal([f"{mps_dir}/{name}" for name in names if name.startswith(GONE)])
    return [f"{mps_dir}/{name}" for name in names if not name.startswith(".")]


def remove_card_folder(folder: str) -> None:
    """Let a card's folder be gone at once, and removed in the background; raise OSError."""
    above = os.path.dirname(folder)
    gone = f"{above}/{GONE}{os.urandom(8).hex()}"
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    start_removal([gone])


def start_removal(folders: list[str]) -> None:
    """Remove folders, however much a user has put there; nobody waits for it."""
    if folders:
        words = ["rm", "-rf", "--one-file-system", "--", *folders]
        BackgroundCall(lambda: subprocess.run(words, stderr=subprocess.DEVNULL, check=False))


def read_control_log(folder: str) -> str:
    """Return the last line of MPS's own log, nothing where there is none; never waits."""
    try:
        above = os.open(f"{folder}/{LOGS}", atomic.OPEN_DIRECTORY)
        try:
            text = atomic.read_text("control.log", 1 << 20, above)
        finally:
            os.close(above)
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return one_line(lines[-1][-200:]) if lines else ""
